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
from sparton.kernels.boundaries import cu_seqlens_of, ranges_within, rows_of, sequence_ids
from sparton.kernels.maxsim import (
    CompressedTokens,
    ResidualCodec,
    maxsim_centroids,
    maxsim_residual_varlen,
)
from sparton.kernels.sort_keys import from_keys, sort_keys
from sparton.packing import pad
from sparton.representations import TokenVectors
from sparton.retrieval.indexes.centroid_lists import CentroidLists
from sparton.retrieval.indexes.late_interaction import (
    LateInteractionIndex,
    on_device,
)
from sparton.retrieval.progress import progress_bar

EXHAUSTIVE_TOKENS = 200_000_000
PROBES = 4
CANDIDATES = 4096
NONE = torch.iinfo(torch.int64).min  # less than all keys
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
        best = []
        with progress_bar(progress, queries.num_texts) as advance:
            for first, last in self._query_blocks(queries):
                block = on_device(self.device, queries.slice(first, last))
                best.append(self._staged(block, self._lists, depth))
                advance(last - first)
        scores, places = zip(*best, strict=True)
        return torch.cat(scores), torch.cat(places)

    def _staged(
        self, queries: TokenVectors, lists: CentroidLists, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the best documents of queries on the device, ``[Q, depth]``; -1 and
        minus infinity for none."""
        Q, cu_seqlens = queries.num_texts, queries.cu_seqlens
        owners = sequence_ids(cu_seqlens, len(queries.values))
        similarities = queries.values.float() @ self.codec.centroids.T
        nearest = similarities.topk(min(self._probes, similarities.shape[1])).indices
        probed = owners.repeat_interleave(nearest.shape[1])
        pairs = lists.hits(nearest.flatten(), probed, Q, len(self._rows))
        stored, numbers = self._gathered(pairs[:, 1], residuals=False)
        approximate = maxsim_centroids(
            queries.values, stored.tokens.codes, self.codec.centroids, cu_seqlens,
            stored.cu_seqlens, pairing=torch.stack((pairs[:, 0], numbers), 1).int(),
        )  # fmt: skip
        keys = _by_query(sort_keys(approximate), pairs[:, 0], Q)
        keys = keys.topk(min(max(self._candidates, depth), keys.shape[1])).values
        places = from_keys(keys)[1].where(keys > NONE, len(pairs))
        documents = F.pad(pairs[:, 1], (0, 1), value=-1)[places].sort(dim=1).values
        refined = sort_keys(self._refined(queries, documents))
        scores, slots = from_keys(refined.topk(min(depth, refined.shape[1])).values)
        places = documents.gather(1, slots)
        beyond = (0, depth - places.shape[1])
        return F.pad(scores, beyond, value=-torch.inf), F.pad(places, beyond, value=-1)

    def _candidate_scores(
        self, queries: TokenVectors, candidates: NDArray[np.int64], progress: str | None
    ) -> NDArray[np.float32]:
        scores = np.zeros(candidates.shape, np.float32)
        if not len(self._rows):
            return scores
        numbers = torch.full((len(self._lengths) + 1,), -1)  # the last one is that of row -1
        numbers[self._rows] = torch.arange(len(self._rows))
        with progress_bar(progress, queries.num_texts) as advance:
            for first, last in self._query_blocks(queries):
                block = on_device(self.device, queries.slice(first, last))
                documents = numbers[torch.from_numpy(candidates[first:last])].to(self.device)
                scores[first:last] = self._refined(block, documents).cpu().numpy()
                advance(last - first)
        return scores

    def _refined(self, queries: TokenVectors, documents: Tensor) -> Tensor:
        """MaxSim of queries and documents with tokens, both on the device.

        Args:
            documents: int64 ``[Q, C]``, -1 for none.

        Returns:
            fp32 ``[Q, C]``, minus infinity for none.
        """
        asked = torch.arange(len(documents), device=self.device)[:, None].expand_as(documents)
        listed = torch.stack((asked, documents.clamp_min(0)), 2).flatten(0, 1)
        scores = []
        for pairs in listed.split(_PAIRS_AT_ONCE):
            stored, numbers = self._gathered(pairs[:, 1])
            found = maxsim_residual_varlen(
                queries.values, stored.tokens, self.codec, queries.cu_seqlens, stored.cu_seqlens,
                pairing=torch.stack((pairs[:, 0], numbers), 1).int(),
            )  # fmt: skip
            scores.append(found)
        return torch.cat(scores).view_as(documents).masked_fill_(documents < 0, -torch.inf)

    def _gathered(self, numbers: Tensor, *, residuals: bool = True) -> tuple[Stored, Tensor]:
        """Documents with tokens on the device, of these numbers at least, and their numbers among
        them: all, or where they lie on the host a copy of those alone."""
        if self._whole is not None:
            return self._whole, numbers
        wanted, own = numbers.unique(return_inverse=True)
        rows, cu_seqlens = rows_of(wanted.cpu(), self._ends)
        codes = self._documents.codes[rows].to(self.device)
        tokens = CompressedTokens(codes, codes.new_empty(0))
        if residuals:
            tokens = _each(self._documents, lambda x: x[rows].to(self.device))
        return Stored(tokens, cu_seqlens.to(self.device)), own

    def _query_blocks(self, queries: TokenVectors) -> Iterator[tuple[int, int]]:
        """Queries whose products with all centroids, and whose hits among all documents, fit."""
        tokens = _PRODUCTS_AT_ONCE // len(self.codec.centroids)
        most = max(_HITS_AT_ONCE // max(len(self._rows), 1), 1)
        return ranges_within(queries.cu_seqlens, tokens, most)


def _by_query(keys: Tensor, owners: Tensor, Q: int) -> Tensor:
    """Keys ``[P]`` of pairs that ascend by query as rows ``[Q, S]``, filled up with NONE."""
    if Q == 1:
        return keys[None]
    asked = cu_seqlens_of(owners.bincount(minlength=Q))
    return pad(keys, asked, max(int(asked.diff().max()), 1), NONE)


def _each(tokens: CompressedTokens, change: Callable[[Tensor], Tensor]) -> CompressedTokens:
    codes, residuals, inverse_norms = tokens
    scales = None if inverse_norms is None else change(inverse_norms)
    return CompressedTokens(change(codes), change(residuals), scales)
