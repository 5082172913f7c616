"""Exact search over token vectors by MaxSim.

N documents, Q queries, C candidates of a query, T tokens, E width of a vector, K results per query.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.kernels.maxsim import maxsim_topk, maxsim_varlen
from sparton.ranges import boundaries_of, ranges_within
from sparton.retrieval.progress import progress_bar
from sparton.retrieval.sparse import check_request
from sparton.retrieval.tokens import TokenRows

_DOCUMENTS_AT_ONCE = 65_536
_PAIRS_AT_ONCE = 65_536


class MultiVectorIndex:
    """Exact search by MaxSim, ``sum over query tokens of max over document tokens of <q, d>``.

    The documents stay in the host's memory; chunks of them pass through the device once in a
    search, so that its working memory is bounded (about 0.5 GB on a CPU and 4 GB on a GPU) whatever
    the number of documents and queries. The same search gives the same bits every time. Texts
    without tokens find nothing and are never found.

    Args:
        documents: N texts.
        device: where to score.
        chunk_tokens: most tokens of a chunk, unless a single document has more.
    """

    def __init__(
        self,
        documents: TokenRows,
        device: torch.device | str = "cpu",
        *,
        chunk_tokens: int | None = None,
    ) -> None:
        self.documents = documents
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self._query_block = 512 if on_gpu else 128
        self._chunk_tokens = chunk_tokens or (2**22 if on_gpu else 2**18)
        self._rows = np.flatnonzero(documents.row_lengths)
        boundaries = np.append(documents.boundaries[self._rows], documents.boundaries[-1])
        self._filled = TokenRows(documents.values, boundaries)

    @torch.inference_mode()
    def search(
        self,
        queries: TokenRows,
        k: int,
        *,
        exclude: NDArray[np.int64] | None = None,
        progress: str | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The K best documents of each query.

        Equal scores are ordered by document row, lower first. Products are summed in fp32; a CPU
        and a GPU may differ in the last bits.

        Args:
            queries: Q texts, stored in the dtype of the documents.
            k: K, at least 1; may exceed the number of documents.
            exclude: ``[Q]``, one document row per query to leave out; -1 leaves out nothing.
            progress: label of a progress bar on standard error; None for no bar.

        Returns:
            scores fp32 ``[Q, K]``, best first, and document rows int64 ``[Q, K]``; slots that no
            document fills come last and hold score 0 and row -1.
        """
        self._check(queries)
        check_request(k, exclude, queries.num_rows)
        depth = min(k + (exclude is not None), max(len(self._rows), 1))
        scores = np.zeros((queries.num_rows, depth), np.float32)
        rows = np.full((queries.num_rows, depth), -1, np.int64)
        if len(self._rows) and queries.num_rows:
            for start, found in zip(
                range(0, queries.num_rows, self._query_block),
                self._search(queries, depth, progress),
                strict=True,
            ):
                stop = start + self._query_block
                scores[start:stop], places = (part.cpu().numpy() for part in found)
                rows[start:stop] = self._rows[places]
        dropped = (queries.row_lengths == 0)[:, None] | (rows < 0)
        if exclude is not None:
            dropped |= rows == exclude[:, None]
        return _ordered(scores, rows, ~dropped, k)

    def _search(
        self, queries: TokenRows, depth: int, progress: str | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Scores and places among the documents with tokens, ``[<= block, depth]`` each."""
        blocks = [
            queries.slice(start, min(start + self._query_block, queries.num_rows)).to(self.device)
            for start in range(0, queries.num_rows, self._query_block)
        ]
        best: list[tuple[Tensor, Tensor]] = []
        chunks = ranges_within(self._filled.boundaries, _DOCUMENTS_AT_ONCE, self._chunk_tokens)
        with progress_bar(progress, self._filled.num_rows) as advance:
            for first, last in chunks:
                tokens, bounds = self._filled.slice(first, last).to(self.device)
                most = min(depth, last - first)
                for number, (vectors, query_bounds) in enumerate(blocks):
                    found = maxsim_topk(vectors, tokens, query_bounds, bounds, most)
                    fresh = found.scores, found.documents + first
                    if first:
                        best[number] = _merge(best[number], fresh, depth)
                    else:
                        best.append(fresh)
                advance(last - first)
        return best

    def rerank(
        self,
        queries: TokenRows,
        candidates: NDArray[np.int64],
        *,
        progress: str | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The candidates of each query in the order of their MaxSim.

        Args:
            queries: Q texts, stored in the dtype of the documents.
            candidates: int64 ``[Q, C]``, document rows, different within a row; -1 for none.
            progress: label of a progress bar on standard error; None for no bar.

        Returns:
            scores and document rows ``[Q, C]`` in the form of :meth:`search`.

        Raises:
            ValueError: candidates of another shape, out of range, or twice in a row.
        """
        self._check(queries)
        ascending = np.sort(candidates, axis=1)
        if ((np.diff(ascending, axis=1) == 0) & (ascending[:, 1:] >= 0)).any():
            raise ValueError("a query has the same candidate twice")
        scores = maxsim_scores(
            queries, self.documents, ascending, self.device,
            chunk_tokens=self._chunk_tokens, progress=progress,
        )  # fmt: skip
        found = (ascending >= 0) & (queries.row_lengths > 0)[:, None]
        if self.documents.num_rows:
            found &= self.documents.row_lengths[ascending] > 0
        return _ordered(scores, ascending, found, candidates.shape[1])

    def _check(self, queries: TokenRows) -> None:
        _check_sides(queries, self.documents)


@torch.inference_mode()
def maxsim_scores(
    queries: TokenRows,
    documents: TokenRows,
    candidates: NDArray[np.int64],
    device: torch.device | str = "cpu",
    *,
    chunk_tokens: int = 2**22,
    progress: str | None = None,
) -> NDArray[np.float32]:
    """MaxSim of each query and each of its candidates; fp32 ``[Q, C]``.

    Args:
        queries, documents: stored in the same dtype.
        candidates: int64 ``[Q, C]``, document rows; -1, and a text without tokens, scores 0.
        device: where to score.
        chunk_tokens: most document tokens that are on the device, and most that are scored at once,
            unless a single document has more.
        progress: label of a progress bar on standard error; None for no bar.

    Raises:
        ValueError: widths or dtypes that differ, candidates of another shape or out of range.
    """
    _check_sides(queries, documents)
    if candidates.ndim != 2 or len(candidates) != queries.num_rows:
        raise ValueError(
            f"candidates have the shape {candidates.shape}, must be [Q, C] with Q = "
            f"{queries.num_rows} queries"
        )
    if candidates.size and not -1 <= candidates.min() <= candidates.max() < documents.num_rows:
        raise ValueError(
            f"candidates from {candidates.min()} to {candidates.max()}, but documents have the "
            f"rows 0 to {documents.num_rows - 1}, and -1 stands for none"
        )
    device = torch.device(device)
    scores = np.zeros(candidates.size, np.float32)
    flat, lengths = candidates.ravel(), documents.row_lengths
    asked = queries.to(device)
    with progress_bar(progress, candidates.size) as advance:
        advance(int((flat < 0).sum()))
        for first, last in ranges_within(documents.boundaries, _DOCUMENTS_AT_ONCE, chunk_tokens):
            chunk = documents.slice(first, last).to(device)
            slots = np.flatnonzero((flat >= first) & (flat < last))
            tokens = boundaries_of(lengths[flat[slots]])
            for start, stop in ranges_within(tokens, _PAIRS_AT_ONCE, chunk_tokens):
                slot = slots[start:stop]
                (vectors, query_bounds), (own, bounds) = (
                    _take(*asked, slot // candidates.shape[1]),
                    _take(*chunk, flat[slot] - first),
                )
                found = maxsim_varlen(vectors, own, query_bounds, bounds, pairing="pairs")
                scores[slot] = found.cpu().numpy()
                advance(len(slot))
    return scores.reshape(candidates.shape)


def _take(values: Tensor, bounds: Tensor, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The given texts end to end, gathered where they are and not on the host."""
    chosen = torch.from_numpy(rows).to(values.device)
    lengths = bounds.diff()[chosen]
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    moves = torch.repeat_interleave(bounds[chosen] - ends[:-1], lengths)
    places = moves + torch.arange(len(moves), device=values.device)
    return values.index_select(0, places), ends.int()


def _merge(
    best: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor], depth: int
) -> tuple[Tensor, Tensor]:
    """The best of two rankings, of which the second one's documents come later."""
    scores, places = (torch.cat(pair, dim=1) for pair in zip(best, fresh, strict=True))
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return scores[:, :depth], places.gather(1, order[:, :depth])


def _ordered(
    scores: NDArray[np.float32], rows: NDArray[np.int64], found: NDArray[np.bool_], k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """What was found, best first and equal scores in the order they come in, in K slots."""
    order = np.argsort(np.where(found, -scores, np.inf), axis=1, kind="stable")[:, :k]
    found = np.take_along_axis(found, order, axis=1)
    slots = ((0, 0), (0, k - order.shape[1]))
    scores = np.where(found, np.take_along_axis(scores, order, axis=1), np.float32(0))
    rows = np.where(found, np.take_along_axis(rows, order, axis=1), -1)
    return np.pad(scores, slots), np.pad(rows, slots, constant_values=-1)


def _check_sides(queries: TokenRows, documents: TokenRows) -> None:
    if queries.width != documents.width or queries.values.dtype != documents.values.dtype:
        raise ValueError(
            f"queries have {queries.values.dtype} vectors of {queries.width}, documents "
            f"{documents.values.dtype} of {documents.width}: encode both with the same model and "
            "store them alike"
        )
