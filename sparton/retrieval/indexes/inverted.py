"""Exact search over sparse vectors by an inverted index.

N documents, Q queries, V terms, P stored weights, K results per query.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.kernels.sparse_search import Postings, invert, search_postings
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations
from sparton.retrieval.indexes.documents import Documents
from sparton.retrieval.indexes.protocols import Found, asked_terms, check_request
from sparton.types import Kind


class InvertedIndex:
    """Exact search by dot product over sparse documents; an
    :class:`~sparton.retrieval.indexes.protocols.Index`.

    A search reads the postings of the queries' terms and nothing else of the documents. It works in
    all of torch's threads, or on a GPU, with memory that is bounded (0.3 GB on a CPU and 2 GB on a
    GPU) unless a single query's scores or results need more.

    Args:
        documents: N vectors on the host; or several parts, one after the other, which may be mapped
            from files and are not concatenated.
        device: where to search.
        block: documents whose scores are in use at a time, a power of 2 from 64 to 65,536; by
            default what suits the device. Results do not depend on it.

    Attributes:
        nbytes: 6 bytes for each stored weight, and 8 for each term of each block.

    Raises:
        ValueError: no parts, parts of different widths, terms out of range, another block.
    """

    kinds: frozenset[Kind] = frozenset({"sparse"})
    exact = True

    def __init__(
        self,
        documents: SparseVectors | Sequence[SparseVectors],
        device: torch.device | str = "cpu",
        *,
        block: int | None = None,
    ) -> None:
        parts = [documents] if isinstance(documents, SparseVectors) else documents
        on_gpu = torch.device(device).type == "cuda"
        self._hold(invert(parts, block=block, on_gpu=on_gpu), device)

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], device: torch.device | str = "cpu"
    ) -> "InvertedIndex":
        """The index that gave these :meth:`arrays`, which may be mapped from a file.

        Raises:
            ValueError: arrays that are no index.
        """
        index = cls.__new__(cls)
        index._hold(Postings.from_arrays(arrays), device)
        return index

    def arrays(self) -> dict[str, Tensor]:
        """What it takes to make the index again, on the host, by name."""
        return self._postings.to("cpu").arrays()

    def __reduce__(self) -> tuple[Callable[..., "InvertedIndex"], tuple[object, ...]]:
        """For pickle, which gives back no ``uint16`` of PyTorch's, but those of NumPy."""
        arrays = {name: each.numpy() for name, each in self.arrays().items()}
        return _from_numpy, (arrays, self._postings.weights.device)

    def _hold(self, postings: Postings, device: torch.device | str) -> None:
        self._postings = postings.to(device)
        self.num_documents, self.width = postings.num_documents, postings.width
        self.nbytes = postings.nbytes

    @torch.inference_mode()
    def search(
        self,
        queries: Representations,
        k: int,
        *,
        exclude: NDArray[np.int64] | None = None,
        progress: str | None = None,
    ) -> Found:
        """The K best documents of each query; arguments, results and errors are those of
        :meth:`Index.search <sparton.retrieval.indexes.protocols.Index.search>`, without a bar of
        progress.

        Only documents with a score above zero are results: a query without terms has none. Scores
        are summed in fp32 in ascending order of terms, each product rounded before it is added. A
        CPU and a GPU give the same bits.
        """
        asked = asked_terms(queries, self.width)
        left_out = check_request(k, exclude, asked.num_vectors).astype(np.int64)
        k = min(k, self.num_documents)
        scores, rows = search_postings(self._postings, asked, k, torch.from_numpy(left_out))
        return Found(scores.numpy(), rows.numpy())


def _from_numpy(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> InvertedIndex:
    tensors = {name: torch.from_numpy(each) for name, each in arrays.items()}
    return InvertedIndex.from_arrays(tensors, device)


def inverted_index(documents: Documents, device: torch.device | str) -> InvertedIndex:
    """The index of documents with sparse vectors; where they keep what is made of them, it is built
    once for CPUs and once for GPUs, and is read in place on a CPU."""
    on_gpu = torch.device(device).type == "cuda"
    arrays = documents.keep(
        f"inverted-{'gpu' if on_gpu else 'cpu'}",
        lambda empty: invert(documents.sparse, on_gpu=on_gpu, empty=empty).arrays(),
    )
    return InvertedIndex.from_arrays(arrays, device)
