"""Search over compressed token vectors: exhaustive, or staged where that would take too long.

N documents, Q queries, K results per query, C centroids, T tokens, W tokens of queries, P pairs of
a query and a document.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sparton.arguments import refuse_below
from sparton.kernels.boundaries import cu_seqlens_of, ranges_within, rows_of
from sparton.kernels.maxsim import (
    CompressedTokens,
    ResidualCodec,
    maxsim_centroids,
    maxsim_residual_varlen,
)
from sparton.packing import pad
from sparton.representations import TokenVectors
from sparton.retrieval.indexes.centroid_lists import CentroidLists
from sparton.retrieval.indexes.late_interaction import LateInteractionIndex, on_device
from sparton.retrieval.progress import progress_bar

EXHAUSTIVE_TOKENS = 200_000_000
PROBES = 4
CANDIDATES = 4096
_PRODUCTS_AT_ONCE = 2**26
_HITS_AT_ONCE = 2**28
_PAIRS_AT_ONCE = 2**20


class Stored(NamedTuple):
    """Compressed documents on the device that scores them.

    Attributes:
        tokens: codes, residuals and inverse norms.
        cu_seqlens: int64 ``[n + 1]``, boundaries of the documents.
    """

    tokens: CompressedTokens
    cu_seqlens: Tensor


class CompressedIndex(LateInteractionIndex[Stored]):
    """Search by the MaxSim of compressed tokens, whose vectors never exist in memory; see
    :class:`~sparton.retrieval.indexes.late_interaction.LateInteractionIndex`.

    An exhaustive search scores all documents. A staged one, after PLAID
    (https://arxiv.org/abs/2205.09707), probes the centroids nearest to each query token, scores the
    documents that have a token near one of them by the centroids of all their tokens, and orders
    the best of these ``candidates`` by MaxSim. It finds those documents alone: fewer than K where
    fewer are probed, and not always the best.

    Args:
        documents: T tokens with their inverse norms. On the device they stay there; on the host,
            those of a chunk, or of candidates, are copied for each search.
        cu_seqlens: int ``[N + 1]`` on the host, boundaries of the documents.
        codec: what the documents were compressed with.
        device: where to score.
        staged: how to search; None for stages from ``exhaustive_tokens`` tokens on.
        probes: centroids of each query token.
        candidates: documents of each query that a staged search orders; at least K are.
        exhaustive_tokens: fewer tokens are searched exhaustively.
        chunk_tokens: most tokens that are scored at a time, unless a single document has more.

    Raises:
        ValueError: ``probes`` or ``candidates`` below 1.
    """

    exact = False

    def __init__(
        self,
        documents: CompressedTokens,
        cu_seqlens: Tensor,
        codec: ResidualCodec,
        device: torch.device | str = "cpu",
        *,
        staged: bool | None = None,
        probes: int = PROBES,
        candidates: int = CANDIDATES,
        exhaustive_tokens: int = EXHAUSTIVE_TOKENS,
        chunk_tokens: int | None = None,
    ) -> None:
        refuse_below(1, probes=probes, candidates=candidates)
        on_gpu = torch.device(device).type == "cuda"
        resident = documents.codes.is_cuda == on_gpu
        if chunk_tokens is None:
            # What stays on a GPU is not copied, and every chunk asks for launches.
            chunk_tokens = 2**18 if not on_gpu else 2**62 if resident else 2**24
        super().__init__(cu_seqlens.long(), device, chunk_tokens, 512 if on_gpu else 128)
        self.codec = ResidualCodec(*(x.to(self.device) for x in codec))
        self._documents, self._probes, self._candidates = documents, probes, candidates
        self._whole = Stored(documents, self._ends.to(self.device)) if resident else None
        self._lists: CentroidLists | None = None
        if staged or (staged is None and documents.codes.numel() >= exhaustive_tokens):
            centroids = len(codec.centroids)
            self._lists = CentroidLists.of(documents.codes, self._ends, centroids, self.device)
        held = [x for x in documents if x is not None]
        held += [*self.codec, cu_seqlens, self._rows, self._ends]
        held += [] if self._whole is None else [self._whole.cu_seqlens]
        held += [] if self._lists is None else [*self._lists]
        self.nbytes = sum(x.nbytes for x in held)

    def _check(self, queries: TokenVectors) -> None:
        width = self.codec.centroids.shape[1]
        if queries.width != width:
            raise ValueError(
                f"queries have vectors of {queries.width}, documents of {width}: encode both with "
                "the same model"
            )

    def _chunk(self, first: int, last: int) -> Stored:
        if self._whole is not None and (first, last) == (0, len(self._rows)):
            return self._whole
        start, stop = self._ends[[first, last]].tolist()
        tokens = _each(self._documents, lambda x: x[start:stop].to(self.device))
        bounds = self._ends if self._whole is None else self._whole.cu_seqlens
        return Stored(tokens, bounds[first : last + 1].to(self.device) - start)

    def _scores(self, queries: TokenVectors, documents: Stored) -> Tensor:
        tokens, bounds = documents
        cu_seqlens = queries.cu_seqlens
        return maxsim_residual_varlen(queries.values, tokens, self.codec, cu_seqlens, bounds)

    def _best(
        self, queries: TokenVectors, depth: int, progress: str | None
    ) -> tuple[Tensor, Tensor]:
        if self._lists is None:
            return super()._best(queries, depth, progress)
        scores = torch.full((queries.num_texts, depth), -torch.inf)
        numbers = torch.full((queries.num_texts, depth), -1)
        with progress_bar(progress, queries.num_texts) as advance:
            for own, block in self._blocks(queries, max(self._candidates, depth)):
                best, found = self._staged(block, self._lists, depth)
                scores[own, : best.shape[1]], numbers[own, : best.shape[1]] = best, found
                advance(block.num_texts)
        return scores, numbers

    def _staged(
        self, queries: TokenVectors, lists: CentroidLists, depth: int
    ) -> tuple[Tensor, Tensor]:
        """The best documents of queries on the device, the best first: scores fp32 and numbers,
        int32, ``[Q, <= depth]`` on the host; minus infinity and -1 for none."""
        Q, wide = queries.num_texts, queries._replace(values=queries.values.float())
        similarities = wide.values @ self.codec.centroids.T
        probes = min(self._probes, similarities.shape[1])
        nearest = similarities.topk(probes, sorted=False).indices
        hits = lists.hits(nearest, queries.cu_seqlens, len(self._rows))
        approximate = self._pair_scores(wide, hits, residuals=False)
        _, places = _best_of(approximate, hits[:, 0], Q, max(self._candidates, depth))
        places = places[places >= 0] if Q > 1 else places[0]
        # They ascend, so that the document of the smaller number comes first among equal scores.
        candidates = hits[places.sort().values]
        scores, places = _best_of(
            self._pair_scores(queries, candidates), candidates[:, 0], Q, depth
        )
        numbers = F.pad(candidates.cpu()[:, 1], (0, 1), value=-1)
        return scores.cpu(), numbers[places.cpu()]

    def _candidate_scores(
        self, queries: TokenVectors, candidates: NDArray[np.int64], progress: str | None
    ) -> NDArray[np.float32]:
        scores = np.zeros(candidates.shape, np.float32)
        if not len(self._rows):
            return scores
        numbers = torch.zeros(len(self._lengths) + 1, dtype=torch.int32)
        numbers[self._rows] = torch.arange(len(self._rows), dtype=torch.int32)
        with progress_bar(progress, queries.num_texts) as advance:
            for own, block in self._blocks(queries, candidates.shape[1]):
                documents = numbers[torch.from_numpy(candidates[own])]
                asked = torch.arange(block.num_texts, dtype=torch.int32)[:, None]
                pairs = torch.stack((asked.expand_as(documents), documents), 2).flatten(0, 1)
                found = self._pair_scores(block, pairs.to(self.device))
                scores[own] = found.view_as(documents).cpu().numpy()
                advance(block.num_texts)
        return scores

    def _pair_scores(
        self, queries: TokenVectors, pairs: Tensor, *, residuals: bool = True
    ) -> Tensor:
        """MaxSim of listed queries and documents, or of the centroids of these alone.

        Args:
            pairs: int32 ``[P, 2]`` on the device, the query and the number of the document among
                those with tokens.

        Returns:
            fp32 ``[P]``.
        """
        (tokens, bounds), pairs = self._gathered(pairs, residuals)
        sides = queries.cu_seqlens, bounds
        if residuals:
            return maxsim_residual_varlen(queries.values, tokens, self.codec, *sides, pairing=pairs)
        centroids = self.codec.centroids
        return maxsim_centroids(queries.values, tokens.codes, centroids, *sides, pairing=pairs)

    def _gathered(self, pairs: Tensor, residuals: bool) -> tuple[Stored, Tensor]:
        """Documents on the device, of these pairs at least, and the pairs with their numbers among
        them: all, or where they lie on the host a copy of those alone."""
        if self._whole is not None:
            return self._whole, pairs
        wanted, own = pairs[:, 1].unique(return_inverse=True)
        rows, cu_seqlens = rows_of(wanted.cpu(), self._ends)
        codes = self._documents.codes[rows].to(self.device)
        tokens = CompressedTokens(codes, codes.new_empty(0))
        if residuals:
            tokens = _each(self._documents, lambda x: x[rows].to(self.device))
        return Stored(tokens, cu_seqlens.to(self.device)), torch.stack((pairs[:, 0], own.int()), 1)

    def _blocks(
        self, queries: TokenVectors, candidates: int
    ) -> Iterator[tuple[slice, TokenVectors]]:
        """Some queries after the other on the device, and which they are. Their products with all
        centroids, hits among all documents, and pairs with candidates fit."""
        tokens = _PRODUCTS_AT_ONCE // len(self.codec.centroids)
        most = min(_HITS_AT_ONCE // max(len(self._rows), 1), _PAIRS_AT_ONCE // max(candidates, 1))
        for first, last in ranges_within(queries.cu_seqlens, tokens, max(most, 1)):
            yield slice(first, last), on_device(self.device, queries.slice(first, last))


def _best_of(scores: Tensor, owners: Tensor, Q: int, k: int) -> tuple[Tensor, Tensor]:
    """The K best pairs of each query, the best first and equal ones in their order.

    Args:
        scores: fp32 ``[P]``. NaN counts as the largest.
        owners: int ``[P]``, the queries, which ascend.

    Returns:
        scores ``[Q, <= K]`` and places among the pairs, int64; minus infinity and -1 for none.
    """
    if Q == 1:  # It has all pairs: nothing is filled up, nor is the device waited for.
        best, places = scores[None].sort(descending=True, stable=True)
        return best[:, :k], places[:, :k]
    bounds = cu_seqlens_of(owners.bincount(minlength=Q))
    rows = pad(scores, bounds, int(bounds.diff().max()), -torch.inf)
    best, order = (x[:, :k] for x in rows.sort(descending=True, stable=True))
    places = bounds[:-1, None] + order
    return best, places.where(places < bounds[1:, None], -1)


def _each(tokens: CompressedTokens, change: Callable[[Tensor], Tensor]) -> CompressedTokens:
    codes, residuals, inverse_norms = tokens
    scales = None if inverse_norms is None else change(inverse_norms)
    return CompressedTokens(change(codes), change(residuals), scales)
