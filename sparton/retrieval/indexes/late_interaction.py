"""What indexes over token vectors have in common, however they store them.

N documents, Q queries, C candidates of a query, T tokens, E width of a vector, K results per query.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.kernels.boundaries import ranges_within
from sparton.kernels.maxsim.boundaries import equal_cu_seqlens
from sparton.kernels.maxsim.topk import keep_best
from sparton.kernels.sort_keys import from_keys
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes.protocols import Found, check_kinds, check_request
from sparton.retrieval.progress import progress_bar
from sparton.types import Kind

Chunk = TypeVar("Chunk")
DOCUMENTS_AT_ONCE = 65_536


class LateInteractionIndex(ABC, Generic[Chunk]):
    """Documents that are searched by MaxSim, ``sum over query tokens of max over document tokens of
    <q, d>``; an :class:`~sparton.retrieval.indexes.protocols.Index` and a
    :class:`~sparton.retrieval.indexes.protocols.Reranker`.

    Chunks of documents are scored one after the other, so that the working memory of a search is
    bounded whatever the number of documents and queries. The same search gives the same bits every
    time. Texts without tokens find nothing and are never found.

    Args:
        cu_seqlens: ``[N + 1]`` on the host, boundaries of the documents.
        device: where to score.
        chunk_tokens: most tokens of a chunk, unless a single document has more.
        query_block: queries that are scored at once.
    """

    kinds: frozenset[Kind] = frozenset({"tokens"})
    exact: bool
    nbytes: int

    def __init__(
        self, cu_seqlens: Tensor, device: torch.device | str, chunk_tokens: int, query_block: int
    ) -> None:
        self.device = torch.device(device)
        self._chunk_tokens, self._query_block = chunk_tokens, query_block
        self._lengths = cu_seqlens.diff()
        # Documents with tokens are numbered without the others: these are their rows and ends.
        self._rows = self._lengths.nonzero().flatten()
        self._ends = torch.cat([cu_seqlens[self._rows], cu_seqlens[-1:]])

    @abstractmethod
    def _check(self, queries: TokenVectors) -> None:
        """Refuse token vectors that cannot be compared with the documents, with a ValueError."""

    @abstractmethod
    def _chunk(self, first: int, last: int) -> Chunk:
        """Documents with tokens, ``first : last`` among them, on the device."""

    @abstractmethod
    def _scores(self, queries: TokenVectors, documents: Chunk) -> Tensor:
        """MaxSim of all queries and documents of a chunk, fp32 ``[Q, n]`` on the device."""

    @abstractmethod
    def _candidate_scores(
        self, queries: TokenVectors, candidates: NDArray[np.int64], progress: str | None
    ) -> NDArray[np.float32]:
        """MaxSim of each query and each of its candidates, rows of documents; fp32 ``[Q, C]``,
        anything for a candidate -1 or without tokens."""

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
        :meth:`Index.search <sparton.retrieval.indexes.protocols.Index.search>`.

        Products are summed in fp32; a CPU and a GPU may differ in the last bits.
        """
        asked = self._asked(queries)
        left_out = check_request(k, exclude, asked.num_texts)
        k = min(k, len(self._lengths))
        depth = min(k + left_out.shape[1], max(len(self._rows), 1))
        scores = torch.empty(asked.num_texts, 0)
        places = torch.empty(asked.num_texts, 0, dtype=torch.int64)
        if len(self._rows) and asked.num_texts:
            scores, places = self._best(asked, depth, progress)
        rows = self._rows[places].where(places >= 0, -1).numpy()
        dropped = (asked.lengths == 0).numpy()[:, None] | (rows < 0)
        for each in left_out.T:
            dropped |= rows == each[:, None]
        return ordered(scores.numpy(), rows, ~dropped, k)

    def _best(
        self, queries: TokenVectors, depth: int, progress: str | None
    ) -> tuple[Tensor, Tensor]:
        """The best documents of Q > 0 queries on the host, the best first: scores fp32
        ``[Q, <= depth]``, and numbers among the documents with tokens, -1 for none, int64."""
        blocks = [
            on_device(
                self.device, queries.slice(start, min(start + self._query_block, queries.num_texts))
            )
            for start in range(0, queries.num_texts, self._query_block)
        ]
        best = [x.cu_seqlens.new_empty(x.num_texts, 0, dtype=torch.int64) for x in blocks]
        # Fewer queries leave room for the scores of more documents.
        documents_at_once = DOCUMENTS_AT_ONCE * self._query_block // blocks[0].num_texts
        chunks = ranges_within(self._ends, self._chunk_tokens, documents_at_once)
        with progress_bar(progress, len(self._rows)) as advance:
            for first, last in chunks:
                documents = self._chunk(first, last)
                for number, block in enumerate(blocks):
                    scores = self._scores(block, documents)
                    best[number] = keep_best(best[number], scores, first, depth)
                advance(last - first)
        return from_keys(torch.cat([keys.cpu() for keys in best]))

    def rerank(
        self,
        queries: Representations,
        candidates: NDArray[np.int64],
        *,
        progress: str | None = None,
    ) -> Found:
        """The candidates of each query in the order of their MaxSim; see
        :meth:`Reranker.rerank <sparton.retrieval.indexes.protocols.Reranker.rerank>`."""
        asked = self._asked(queries)
        check_candidates(candidates, asked.num_texts, len(self._lengths))
        ascending = np.sort(candidates, axis=1)
        if ((np.diff(ascending, axis=1) == 0) & (ascending[:, 1:] >= 0)).any():
            raise ValueError("a query has the same candidate twice")
        scores = self._candidate_scores(asked, ascending, progress)
        found = (ascending >= 0) & (asked.lengths > 0).numpy()[:, None]
        if len(self._lengths):
            found &= self._lengths.numpy()[ascending] > 0
        return ordered(scores, ascending, found, candidates.shape[1])

    def _asked(self, queries: Representations) -> TokenVectors:
        check_kinds(queries, self.kinds)
        (kind,) = self.kinds
        asked: TokenVectors = getattr(queries, kind)
        self._check(asked)
        return asked


def on_device(device: torch.device, vectors: TokenVectors) -> TokenVectors:
    """Texts on a device, with int32 boundaries; on a CPU in fp32, as it computes in no other, on a
    GPU those in FP8 in fp16."""
    values, bounds = vectors.values.to(device), vectors.cu_seqlens.int()
    if vectors.num_texts == 1:  # the same for most queries: not to be copied each time
        bounds = equal_cu_seqlens(1, len(values), values.device)
    moved = vectors._replace(values=values, cu_seqlens=bounds).to(device)
    if device.type == "cpu":
        moved = moved.restored()
        return moved._replace(values=moved.values.float())
    return moved.restored(torch.float16)


def check_candidates(candidates: NDArray[np.int64], num_queries: int, num_documents: int) -> None:
    """Refuse candidates that are not rows of documents.

    Raises:
        ValueError: no whole numbers, another shape than ``[Q, C]``, or numbers of documents that
            there are not.
    """
    if not isinstance(candidates, np.ndarray) or candidates.dtype.kind != "i":
        kind = getattr(candidates, "dtype", type(candidates).__name__)
        raise ValueError(f"candidates are {kind}, must be an array of int64, rows of documents")
    if candidates.ndim != 2 or len(candidates) != num_queries:
        raise ValueError(
            f"candidates have the shape {candidates.shape}, must be [Q, C] with Q = "
            f"{num_queries} queries"
        )
    if candidates.size and not -1 <= candidates.min() <= candidates.max() < num_documents:
        raise ValueError(
            f"candidates from {candidates.min()} to {candidates.max()}, but documents have the "
            f"rows 0 to {num_documents - 1}, and -1 stands for none"
        )


def ordered(
    scores: NDArray[np.float32], rows: NDArray[np.int64], found: NDArray[np.bool_], k: int
) -> Found:
    """What was found, best first and equal scores in the order they come in, in K slots."""
    order = np.argsort(np.where(found, -scores, np.inf), axis=1, kind="stable")[:, :k]
    own = np.arange(len(order))[:, None], order
    best = Found(np.zeros((len(order), k), np.float32), np.full((len(order), k), -1, np.int64))
    np.copyto(best.scores[:, : order.shape[1]], scores[own], where=found[own])
    np.copyto(best.rows[:, : order.shape[1]], rows[own], where=found[own])
    return best
