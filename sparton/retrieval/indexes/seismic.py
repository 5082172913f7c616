"""Approximate search over sparse vectors by Seismic (Bruch et al., SIGIR 2024, arXiv 2404.18812).

The package pyseismic-lsr does the work, on a CPU. What is astonishing about it is dealt with here:
its defaults lose much of the recall of short queries, it drops documents without weights together
with their ids, it answers queries in any order, keeps weights as fp16, dies where ``k`` is 0, and
prints.

N documents, Q queries, K results per query.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.arguments import ArgumentError, Instance, refuse_below
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations
from sparton.retrieval.indexes.documents import Documents
from sparton.retrieval.indexes.exact import TwoStageIndex
from sparton.retrieval.indexes.maxsim import MultiVectorIndex
from sparton.retrieval.indexes.protocols import (
    Found,
    Index,
    asked_terms,
    check_request,
    refuse_dense,
)
from sparton.retrieval.settings import RERANK_DEPTH
from sparton.types import Kind

_NARROW = 65_535  # terms that 16 bits tell apart
_LARGEST = 2.0**15  # of a weight: fp16 holds no more than 65,504


@dataclass(frozen=True)
class SeismicIndexBuilder:
    """Makes a :class:`SeismicIndex` of encoded documents; an
    :class:`~sparton.retrieval.indexes.exact.IndexBuilder`.

    With token vectors beside the sparse ones, it finds ``rerank_depth`` candidates, which MaxSim
    puts in order.

    Attributes:
        n_postings: documents of a term that are kept, on average.
        centroid_fraction: groups of a term, as a share of its documents.
        summary_energy: share of a group's weights that its summary has; less is smaller and faster,
            and loses recall, above all of short queries.
        query_cut: terms of a query that are looked at, the largest; None for all.
        heap_factor: groups are passed over whose summary times this is below the K-th score; less
            loses more.

    Raises:
        ValueError: a number that cannot be, or pyseismic-lsr is not installed.
    """

    needs: ClassVar[frozenset[Kind]] = frozenset({"sparse"})

    n_postings: int = 3500
    centroid_fraction: float = 0.1
    summary_energy: float = 1.0
    query_cut: int | None = None
    heap_factor: float = 0.8

    def __post_init__(self) -> None:
        _seismic()  # before anything is encoded
        refuse_below(1, n_postings=self.n_postings, query_cut=self.query_cut)
        for name in ("centroid_fraction", "summary_energy", "heap_factor"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ArgumentError(f"{{{name}}} must be above 0 and at most 1", **{name: value})

    def __call__(
        self,
        documents: Representations | Documents,
        device: torch.device | str = "cpu",
        *,
        rerank_depth: int = RERANK_DEPTH,
    ) -> Index:
        """
        Args:
            documents: N texts on the host; their sparse vectors are read into memory.
            device: where MaxSim orders candidates.
            rerank_depth: candidates of a query where documents have token vectors as well.

        Raises:
            ValueError: documents without sparse vectors, or with negative weights.
        """
        documents = Documents.of(documents)
        if "sparse" not in documents.kinds:
            raise ArgumentError(
                "Seismic searches sparse vectors, and these documents have none: set {index}",
                index=Instance("exact_index"),
            )
        refuse_dense("Seismic", documents.kinds)
        first = SeismicIndex(SparseVectors.concatenate(documents.sparse), self)
        if "tokens" not in documents.kinds:
            return first
        return TwoStageIndex(first, MultiVectorIndex(documents.tokens, device), rerank_depth)


class SeismicIndex:
    """Approximate search by dot product over sparse documents; an
    :class:`~sparton.retrieval.indexes.protocols.Index`.

    Weights are rounded to fp16, and so are scores, by at most 2^-11 of their size. The same
    documents may give another index the next time: the groups are drawn at random.

    Args:
        documents: N vectors on the host, whose weights are positive.
        settings: of the index and of searches.
    """

    kinds: frozenset[Kind] = frozenset({"sparse"})
    exact = False

    def __init__(self, documents: SparseVectors, settings: SeismicIndexBuilder) -> None:
        seismic = _seismic()
        if (documents.values < 0).any():
            raise ArgumentError(
                "Seismic takes weights from 0 on alone, and there is {}: set {index}",
                f"{documents.values.min():.3g}",
                index=Instance("exact_index"),
            )
        self.width, self._settings = documents.width, settings
        self._num_documents = documents.num_vectors
        self._rows = documents.lengths.nonzero().flatten().numpy()  # those that have weights
        self._string = seismic.get_seismic_string()
        # Where fp16 is too small, all weights are divided by a power of 2, and scores multiplied.
        largest = float(documents.values.max()) if documents.num_entries else 1.0
        self._scale = 2.0 ** max(np.ceil(np.log2(largest / _LARGEST)), 0)
        wide = "LV" if documents.width > _NARROW else ""
        dataset = getattr(seismic, f"SeismicDataset{wide}")(dim=max(documents.width, 1))
        dataset.add_documents_by_id(
            [str(row) for row in range(documents.num_vectors)],
            documents.terms.numpy().astype(np.int64),
            documents.values.numpy() / np.float32(self._scale),
            documents.cu_seqlens.numpy().astype(np.int64),
        )
        with _caught_output() as output:
            self._index = getattr(seismic, f"SeismicIndex{wide}").build_from_dataset(
                dataset,
                n_postings=settings.n_postings,
                centroid_fraction=settings.centroid_fraction,
                summary_energy=settings.summary_energy,
                num_threads=torch.get_num_threads(),
            )
            self._index.print_space_usage_byte()
            self.nbytes = _total_bytes(output)

    def search(
        self,
        queries: Representations,
        k: int,
        *,
        exclude: NDArray[np.int64] | None = None,
        progress: str | None = None,
    ) -> Found:
        """K good documents of each query, of those with a score above zero; arguments, results and
        errors are those of :meth:`Index.search
        <sparton.retrieval.indexes.protocols.Index.search>`, without a bar of progress."""
        asked = asked_terms(queries, self.width)
        left_out = check_request(k, exclude, asked.num_vectors)
        k = min(k, self._num_documents)
        found = Found(
            np.zeros((asked.num_vectors, k), np.float32),
            np.full((asked.num_vectors, k), -1, np.int64),
        )
        depth = min(k + left_out.shape[1], len(self._rows))
        if depth == 0:
            return found
        for results in self._ask(asked, depth):
            if not results:
                continue
            query = int(results[0][0])  # they come in any order
            scores = np.array([score for _, score, _ in results], np.float32)
            rows = np.array([int(document) for _, _, document in results])
            kept = (scores > 0) & ~np.isin(rows, left_out[query])
            scores, rows = scores[kept], rows[kept]
            order = np.lexsort((rows, -scores))[:k]
            found.scores[query, : len(order)] = scores[order] * np.float32(self._scale)
            found.rows[query, : len(order)] = rows[order]
        return found

    def _ask(self, queries: SparseVectors, depth: int) -> list[list[tuple[str, float, str]]]:
        """Query, score and document of what is found, each query's in a list."""
        values, terms, ends = (x.numpy() for x in queries[:3])
        # Terms are named by their numbers, in strings of a dtype of its own.
        names = [part.astype(self._string) for part in np.split(terms, ends[1:-1])]
        return self._index.batch_search(
            np.arange(queries.num_vectors).astype(self._string),
            names,
            np.split(values, ends[1:-1]),
            k=depth,
            query_cut=self._settings.query_cut or self.width,
            heap_factor=self._settings.heap_factor,
            num_threads=torch.get_num_threads(),
        )


def _seismic() -> Any:
    """The package.

    Raises:
        ValueError: it is not installed, or too old.
    """
    try:
        import seismic

        _ = seismic.SeismicDataset.add_documents_by_id
    except (ImportError, AttributeError) as error:
        raise ValueError(
            "Seismic needs pyseismic-lsr from 0.5.4 on, which there is for Python below 3.12, and "
            f"this is {sys.version_info.major}.{sys.version_info.minor}: "
            + ("pip install 'sparton[seismic]'" if sys.version_info < (3, 12) else "use another")
        ) from error
    return seismic


@contextmanager
def _caught_output() -> Iterator[IO[bytes]]:
    """A file that has what is written to standard output meanwhile, by whatever in this process."""
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(output.fileno(), 1)
        try:
            yield output
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _total_bytes(output: IO[bytes]) -> int:
    """What :meth:`print_space_usage_byte` of an index says."""
    output.seek(0)
    said = output.read().decode()
    total = re.search(r"Total: (\d+) Bytes", said)
    assert total, f"pyseismic-lsr tells sizes otherwise now: {said}"
    return int(total[1])
