"""Exact search over sparse vectors.

N documents, Q queries, V terms, P stored weights, K results per query.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from sparton.kernels.sort_keys import from_keys, sort_keys
from sparton.packing import ranges_within, sequence_ids
from sparton.representations import Representations
from sparton.retrieval.indexes.protocols import Found, check_kinds, check_request
from sparton.sparse_vectors import SparseVectors, term_counts
from sparton.types import Kind


def mean_flops(queries: SparseVectors, documents: SparseVectors) -> float:
    """Expected number of multiplications to score one query against one document.

    The sum over the terms of p_q(v) p_d(v), p the share of the queries (documents) in which term
    v is active: the FLOPS measure of Formal et al., SPLADE, 2021.
    """
    shares = (
        term_counts(side).double() / max(side.num_vectors, 1) for side in (queries, documents)
    )
    return float(torch.dot(*shares))


class SparseIndex:
    """Exact search by dot product over sparse documents; an
    :class:`~sparton.retrieval.indexes.protocols.Index`.

    The index holds the documents' active weights on its device, 8 bytes each, and nothing else.
    A search multiplies document chunks with query blocks, so that its working memory is bounded
    (under 0.5 GB on a CPU and 2 GB on a GPU) whatever the number of documents and queries.

    Args:
        documents: N vectors.
        device: where to search.
        chunk_documents: most documents scored at a time.
        chunk_weights: most weights in one chunk, unless a single document has more.
    """

    kinds: frozenset[Kind] = frozenset({"sparse"})
    exact = True

    def __init__(
        self,
        documents: SparseVectors,
        device: torch.device | str = "cpu",
        *,
        chunk_documents: int = 65_536,
        chunk_weights: int = 2**26,
    ) -> None:
        self.num_documents = documents.num_vectors
        self.width = documents.width
        self.device = torch.device(device)
        self._query_block = 512 if self.device.type == "cuda" else 128
        self._chunks = [
            _Chunk(first, documents.slice(first, last).to(self.device))
            for first, last in ranges_within(documents.cu_seqlens, chunk_weights, chunk_documents)
        ]
        held = (each for chunk in self._chunks for each in chunk.documents[:3])
        self.nbytes = sum(each.nbytes for each in held)

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
        are summed in fp32 in the order of the documents' terms; a CPU and a GPU may differ in the
        last bits.
        """
        check_kinds(queries, self.kinds)
        asked = queries.sparse
        assert isinstance(asked, SparseVectors), "a collection holds active entries alone"
        self._check(asked, k, exclude)
        keys = torch.zeros(asked.num_vectors, k, dtype=torch.int64, device=self.device)
        left_out = np.full(asked.num_vectors, -1) if exclude is None else exclude
        excluded = torch.from_numpy(left_out).to(self.device)
        for start in range(0, asked.num_vectors, self._query_block):
            stop = min(start + self._query_block, asked.num_vectors)
            block = _dense_columns(asked.slice(start, stop).to(self.device))
            best = keys[start:stop, :0]
            for chunk in self._chunks:
                found = chunk.best(block, k, excluded[start:stop])
                best = _best(torch.cat([best, found], dim=1), k) if best.shape[1] else found
            keys[start:stop, : best.shape[1]] = best
        scores, rows = from_keys(keys)
        rows.masked_fill_(scores <= 0, -1)
        return Found(scores.cpu().numpy(), rows.cpu().numpy())

    def _check(self, queries: SparseVectors, k: int, exclude: NDArray[np.int64] | None) -> None:
        if queries.width != self.width:
            raise ValueError(
                f"queries have {queries.width} terms but the index has {self.width}: "
                "encode both with the same model"
            )
        check_request(k, exclude, queries.num_vectors)


class _Chunk(NamedTuple):
    """Documents from number ``first_row`` on, on the index's device."""

    first_row: int
    documents: SparseVectors

    def best(self, block: Tensor, k: int, excluded: Tensor) -> Tensor:
        """Keys of the best documents for the queries in ``block [V, Q]``; int64 ``[Q, <= k]``."""
        scores = F.embedding_bag(
            self.documents.terms,
            block,
            self.documents.cu_seqlens.int(),
            mode="sum",
            per_sample_weights=self.documents.values,
            include_last_offset=True,
        )
        num_documents, num_queries = scores.shape
        rows = excluded - self.first_row
        inside = (rows >= 0) & (rows < num_documents)
        query_rows = torch.arange(num_queries, device=block.device)
        scores[rows[inside], query_rows[inside]] = 0
        # What is not above zero is no result, whatever its sign.
        keys = sort_keys(scores.t().contiguous().clamp_(min=0), self.first_row, non_negative=True)
        return _best(keys, k)


def _best(keys: Tensor, k: int) -> Tensor:
    return keys.topk(min(k, keys.shape[1]), dim=1).values


def _dense_columns(vectors: SparseVectors) -> Tensor:
    """Q vectors as the columns of a dense fp32 ``[V, Q]``."""
    columns = sequence_ids(vectors.cu_seqlens, vectors.num_entries)
    block = vectors.values.new_zeros(vectors.width, vectors.num_vectors)
    block[vectors.terms.long(), columns] = vectors.values
    return block
