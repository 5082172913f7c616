"""Exact search over token vectors by MaxSim.

N documents, Q queries, C candidates of a query, T tokens, E width of a vector, K results per query.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.kernels.maxsim import maxsim_topk, maxsim_varlen
from sparton.packing import cu_seqlens_of, ranges_within
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes.protocols import Found, check_kinds, check_request
from sparton.retrieval.progress import progress_bar
from sparton.types import Kind

_DOCUMENTS_AT_ONCE = 65_536
_PAIRS_AT_ONCE = 65_536


class MultiVectorIndex:
    """Exact search by MaxSim, ``sum over query tokens of max over document tokens of <q, d>``; an
    :class:`~sparton.retrieval.indexes.protocols.Index` and a
    :class:`~sparton.retrieval.indexes.protocols.Reranker`.

    The documents stay in the host's memory; chunks of them pass through the device once in a
    search, so that its working memory is bounded (about 0.5 GB on a CPU and 4 GB on a GPU) whatever
    the number of documents and queries. The same search gives the same bits every time. Texts
    without tokens find nothing and are never found.

    Args:
        documents: N texts on the host, without a mask.
        device: where to score.
        chunk_tokens: most tokens of a chunk, unless a single document has more.
    """

    kinds: frozenset[Kind] = frozenset({"tokens"})
    exact = True

    def __init__(
        self,
        documents: TokenVectors,
        device: torch.device | str = "cpu",
        *,
        chunk_tokens: int | None = None,
    ) -> None:
        self.documents = documents
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self._query_block = 512 if on_gpu else 128
        self._chunk_tokens = chunk_tokens or (2**22 if on_gpu else 2**18)
        self._rows = documents.lengths.nonzero().flatten()
        ends = torch.cat([documents.cu_seqlens[self._rows], documents.cu_seqlens[-1:]])
        self._filled = TokenVectors(documents.values, ends)
        held = (documents.values, documents.cu_seqlens, self._rows, ends)
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
        :meth:`Index.search <sparton.retrieval.indexes.protocols.Index.search>`.

        Queries are stored in the dtype of the documents. Products are summed in fp32; a CPU and a
        GPU may differ in the last bits.
        """
        asked = self._asked(queries)
        check_request(k, exclude, asked.num_texts)
        depth = min(k + (exclude is not None), max(len(self._rows), 1))
        scores = np.zeros((asked.num_texts, depth), np.float32)
        rows = np.full((asked.num_texts, depth), -1, np.int64)
        if len(self._rows) and asked.num_texts:
            for start, found in zip(
                range(0, asked.num_texts, self._query_block),
                self._search(asked, depth, progress),
                strict=True,
            ):
                stop = start + self._query_block
                scores[start:stop], places = found[0].cpu().numpy(), found[1].cpu()
                rows[start:stop] = self._rows[places].numpy()
        dropped = (asked.lengths == 0).numpy()[:, None] | (rows < 0)
        if exclude is not None:
            dropped |= rows == exclude[:, None]
        return _ordered(scores, rows, ~dropped, k)

    def _search(
        self, queries: TokenVectors, depth: int, progress: str | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Scores and places among the documents with tokens, ``[<= block, depth]`` each."""
        blocks = [
            _on(
                self.device, queries.slice(start, min(start + self._query_block, queries.num_texts))
            )
            for start in range(0, queries.num_texts, self._query_block)
        ]
        best: list[tuple[Tensor, Tensor]] = []
        chunks = ranges_within(self._filled.cu_seqlens, self._chunk_tokens, _DOCUMENTS_AT_ONCE)
        with progress_bar(progress, self._filled.num_texts) as advance:
            for first, last in chunks:
                documents = _on(self.device, self._filled.slice(first, last))
                most = min(depth, last - first)
                for number, block in enumerate(blocks):
                    found = maxsim_topk(
                        block.values, documents.values, block.cu_seqlens, documents.cu_seqlens, most
                    )
                    fresh = found.scores, found.documents + first
                    if first:
                        best[number] = _merge(best[number], fresh, depth)
                    else:
                        best.append(fresh)
                advance(last - first)
        return best

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
        ascending = np.sort(candidates, axis=1)
        if ((np.diff(ascending, axis=1) == 0) & (ascending[:, 1:] >= 0)).any():
            raise ValueError("a query has the same candidate twice")
        scores = maxsim_scores(
            asked, self.documents, ascending, self.device,
            chunk_tokens=self._chunk_tokens, progress=progress,
        )  # fmt: skip
        found = (ascending >= 0) & (asked.lengths > 0).numpy()[:, None]
        if self.documents.num_texts:
            found &= self.documents.lengths.numpy()[ascending] > 0
        return _ordered(scores, ascending, found, candidates.shape[1])

    def _asked(self, queries: Representations) -> TokenVectors:
        check_kinds(queries, self.kinds)
        assert queries.tokens is not None
        _check_sides(queries.tokens, self.documents)
        return queries.tokens


@torch.inference_mode()
def maxsim_scores(
    queries: TokenVectors,
    documents: TokenVectors,
    candidates: NDArray[np.int64],
    device: torch.device | str = "cpu",
    *,
    chunk_tokens: int = 2**22,
    progress: str | None = None,
) -> NDArray[np.float32]:
    """MaxSim of each query and each of its candidates; fp32 ``[Q, C]``.

    Args:
        queries, documents: on the host, without masks, stored in the same dtype.
        candidates: int64 ``[Q, C]``, document rows; -1, and a text without tokens, scores 0.
        device: where to score.
        chunk_tokens: most document tokens that are on the device, and most that are scored at once,
            unless a single document has more.
        progress: label of a progress bar on standard error; None for no bar.

    Raises:
        ValueError: widths or dtypes that differ, candidates of another shape or out of range.
    """
    _check_sides(queries, documents)
    if candidates.ndim != 2 or len(candidates) != queries.num_texts:
        raise ValueError(
            f"candidates have the shape {candidates.shape}, must be [Q, C] with Q = "
            f"{queries.num_texts} queries"
        )
    if candidates.size and not -1 <= candidates.min() <= candidates.max() < documents.num_texts:
        raise ValueError(
            f"candidates from {candidates.min()} to {candidates.max()}, but documents have the "
            f"rows 0 to {documents.num_texts - 1}, and -1 stands for none"
        )
    device = torch.device(device)
    scores = np.zeros(candidates.size, np.float32)
    flat, asked = torch.from_numpy(candidates.ravel()), _on(device, queries)
    with progress_bar(progress, candidates.size) as advance:
        advance(int((flat < 0).sum()))
        for first, last in ranges_within(documents.cu_seqlens, chunk_tokens, _DOCUMENTS_AT_ONCE):
            chunk = _on(device, documents.slice(first, last))
            slots = ((flat >= first) & (flat < last)).nonzero().flatten()
            tokens = cu_seqlens_of(documents.lengths[flat[slots]])
            for start, stop in ranges_within(tokens, chunk_tokens, _PAIRS_AT_ONCE):
                slot = slots[start:stop]
                # Gathered on the device and not on the host.
                left = asked.take((slot // candidates.shape[1]).to(device))
                right = chunk.take((flat[slot] - first).to(device))
                found = maxsim_varlen(
                    left.values, right.values, left.cu_seqlens.int(), right.cu_seqlens.int(),
                    pairing="pairs",
                )  # fmt: skip
                scores[slot.numpy()] = found.cpu().numpy()
                advance(len(slot))
    return scores.reshape(candidates.shape)


def _on(device: torch.device, vectors: TokenVectors) -> TokenVectors:
    """Texts on a device, with int32 boundaries; on a CPU in fp32, as it computes in no other."""
    values = vectors.values.to(device)
    return TokenVectors(
        values.float() if device.type == "cpu" else values, vectors.cu_seqlens.int().to(device)
    )


def _merge(
    best: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor], depth: int
) -> tuple[Tensor, Tensor]:
    """The best of two rankings, of which the second one's documents come later."""
    scores, places = (torch.cat(pair, dim=1) for pair in zip(best, fresh, strict=True))
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return scores[:, :depth], places.gather(1, order[:, :depth])


def _ordered(
    scores: NDArray[np.float32], rows: NDArray[np.int64], found: NDArray[np.bool_], k: int
) -> Found:
    """What was found, best first and equal scores in the order they come in, in K slots."""
    order = np.argsort(np.where(found, -scores, np.inf), axis=1, kind="stable")[:, :k]
    found = np.take_along_axis(found, order, axis=1)
    slots = ((0, 0), (0, k - order.shape[1]))
    scores = np.where(found, np.take_along_axis(scores, order, axis=1), np.float32(0))
    rows = np.where(found, np.take_along_axis(rows, order, axis=1), -1)
    return Found(np.pad(scores, slots), np.pad(rows, slots, constant_values=-1))


def _check_sides(queries: TokenVectors, documents: TokenVectors) -> None:
    asked, stored = (
        f"{str(side.values.dtype).removeprefix('torch.')} vectors of {side.width}"
        for side in (queries, documents)
    )
    if asked != stored:
        raise ValueError(
            f"queries have {asked}, documents {stored}: encode both with the same model and store "
            "them alike"
        )
