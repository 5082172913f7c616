"""Exact search over token vectors that several devices share.

N documents, Q queries, C candidates of a query, K results of a query.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.representations import Representations
from sparton.retrieval.indexes.documents import TokenParts
from sparton.retrieval.indexes.late_interaction import check_candidates, ordered
from sparton.retrieval.indexes.maxsim import MultiVectorIndex
from sparton.retrieval.indexes.protocols import Found, check_request
from sparton.types import Kind

Rows = NDArray[np.int64]


class _Share(NamedTuple):
    """Documents ``first : last`` on one of the devices."""

    held: MultiVectorIndex
    first: int
    last: int

    def own(self, rows: Rows) -> Rows:
        """Rows of documents as this index numbers them, -1 for those of others."""
        return np.where((rows >= self.first) & (rows < self.last), rows - self.first, -1)

    def of_all(self, found: Found) -> Found:
        """Results of this index with the rows of all documents."""
        return found._replace(rows=np.where(found.rows >= 0, found.rows + self.first, -1))


class DividedIndex:
    """Documents that follow each other in shares of about as many tokens, each searched by a
    :class:`~sparton.retrieval.indexes.maxsim.MultiVectorIndex` on a device of its own, all at the
    same time; an :class:`~sparton.retrieval.indexes.protocols.Index` and a
    :class:`~sparton.retrieval.indexes.protocols.Reranker`.

    Results are those of a single index: on GPUs to the bit; on a CPU scores may differ in their
    last bits, as those of a product do with its size.

    Args:
        documents: N texts on the host, with one token or more.
        devices: at least one; one that is named twice has two shares.
        kind: which half of the queries is compared.
    """

    exact = True

    def __init__(
        self, documents: TokenParts, devices: Sequence[torch.device], kind: Kind = "tokens"
    ) -> None:
        self.kinds, self._num_texts = frozenset({kind}), documents.num_texts
        inner = torch.arange(1, len(devices)) * documents.num_tokens // len(devices)
        starts = torch.searchsorted(documents.cu_seqlens, inner).tolist()

        def build(device: torch.device, between: tuple[int, int]) -> _Share | None:
            if between[0] == between[1]:  # fewer documents than devices
                return None
            own = documents.between(*between)
            return _Share(MultiVectorIndex(own, device, kind=kind), *between)

        # Side by side: each copies its documents to its device.
        with ThreadPoolExecutor(len(devices)) as threads:
            built = [*threads.map(build, devices, pairwise([0, *starts, self._num_texts]))]
        self._shares = [share for share in built if share is not None]
        self.nbytes = sum(share.held.nbytes for share in self._shares)

    def search(
        self,
        queries: Representations,
        k: int,
        *,
        exclude: Rows | None = None,
        progress: str | None = None,
    ) -> Found:
        """See :meth:`Index.search <sparton.retrieval.indexes.protocols.Index.search>`."""
        check_request(k, exclude, queries.num_texts)

        def search(share: _Share, label: str | None) -> Found:
            own = None if exclude is None else share.own(exclude)
            return share.held.search(queries, k, exclude=own, progress=label)

        return self._merged(search, progress, min(k, self._num_texts))

    def rerank(
        self, queries: Representations, candidates: Rows, *, progress: str | None = None
    ) -> Found:
        """See :meth:`Reranker.rerank <sparton.retrieval.indexes.protocols.Reranker.rerank>`."""
        check_candidates(candidates, queries.num_texts, self._num_texts)

        def rerank(share: _Share, label: str | None) -> Found:
            return share.held.rerank(queries, share.own(candidates), progress=label)

        return self._merged(rerank, progress, candidates.shape[1])

    def _merged(
        self, find: Callable[[_Share, str | None], Found], progress: str | None, k: int
    ) -> Found:
        """The best of what all shares find. The first one's bar speaks for all: they have as much
        to do."""

        def run(share: _Share, label: str | None) -> Found:
            device = share.held.device
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                return share.of_all(find(share, label))

        labels = [progress, *[None] * (len(self._shares) - 1)]
        # Threads of this search alone: an index that keeps some is lost in a process that forks.
        with ThreadPoolExecutor(len(self._shares)) as threads:
            found = [*threads.map(run, self._shares, labels)]
        # Where scores are equal, those of lower rows come first, as shares follow each other.
        scores, rows = (np.concatenate(part, axis=1) for part in zip(*found))
        return ordered(scores, rows, rows >= 0, k)
