"""Exact search over token vectors by MaxSim.

N documents, Q queries, C candidates of a query, T tokens, E width of a vector, K results per query.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of, ranges_within
from sparton.kernels.maxsim import maxsim_varlen
from sparton.representations import TokenVectors
from sparton.retrieval.indexes.documents import TokenParts, has_room
from sparton.retrieval.indexes.late_interaction import (
    DOCUMENTS_AT_ONCE,
    LateInteractionIndex,
    check_candidates,
    on_device,
)
from sparton.retrieval.progress import progress_bar
from sparton.types import Kind

_PAIRS_AT_ONCE = 65_536
RESIDENT = 0.5  # share of a GPU's free memory that documents may take
_CHUNKS = 8  # whose boundaries are kept on a device


class MultiVectorIndex(LateInteractionIndex[TokenVectors]):
    """Exact search by MaxSim; see
    :class:`~sparton.retrieval.indexes.late_interaction.LateInteractionIndex`.

    Documents are kept in the memory of a GPU that has room for them, see :func:`resident`. Others
    stay where they are, in the host's memory or in files; chunks of them pass through the device
    once in a search, so that its working memory is bounded (about 0.5 GB on a CPU and 4 GB on a
    GPU) whatever the number of documents and queries. Queries are stored in the dtype of
    the documents, or in float16 where these are in FP8: what is compared is what FP8 has left of
    documents, on a GPU rounded once more, to float16.

    Args:
        documents: N texts on the host, without a mask, or in several parts.
        device: where to score.
        chunk_tokens: most tokens of a chunk, unless a single document has more.
        kind: which half of the queries is compared: of "dense", whose texts have one vector each,
            MaxSim is the dot product.
    """

    exact = True

    def __init__(
        self,
        documents: TokenVectors | TokenParts,
        device: torch.device | str = "cpu",
        *,
        chunk_tokens: int | None = None,
        kind: Kind = "tokens",
    ) -> None:
        self.kinds = frozenset({kind})
        documents = TokenParts.of(documents)
        on_gpu = torch.device(device).type == "cuda"
        self.documents = resident(documents, torch.device(device))
        self._resident = self.documents.device.type == "cuda"
        self._pair_tokens = chunk_tokens or (2**22 if on_gpu else 2**18)
        # What stays on a GPU is not copied, and every chunk asks for launches.
        tokens = 2**62 if self._resident and chunk_tokens is None else self._pair_tokens
        super().__init__(documents.cu_seqlens, device, tokens, 512 if on_gpu else 128)
        self._chunks: dict[tuple[int, int], TokenVectors] = {}
        self.nbytes = documents.nbytes + self._rows.nbytes + self._ends.nbytes

    def _check(self, queries: TokenVectors) -> None:
        _check_sides(queries, self.documents)

    def _chunk(self, first: int, last: int) -> TokenVectors:
        if (first, last) in self._chunks:
            return self._chunks[first, last]
        held = self.documents.slice(int(self._rows[first]), int(self._rows[last - 1]) + 1)
        bounds = self._ends[first : last + 1] - self._ends[first]
        if self.device.type == "cpu" and held.scales is None:  # fp32 is made of few at a time
            return held._replace(cu_seqlens=bounds.int())
        chunk = on_device(self.device, held._replace(cu_seqlens=bounds))
        if self._resident and held.scales is None:  # no copy but that of the boundaries
            if len(self._chunks) == _CHUNKS:
                self._chunks.clear()
            self._chunks[first, last] = chunk
        return chunk

    def _scores(self, queries: TokenVectors, documents: TokenVectors) -> Tensor:
        bounds = queries.cu_seqlens, documents.cu_seqlens
        asked = queries.values.to(documents.values.dtype)  # in which they were stored
        return maxsim_varlen(asked, documents.values, *bounds)

    def _candidate_scores(
        self, queries: TokenVectors, candidates: NDArray[np.int64], progress: str | None
    ) -> NDArray[np.float32]:
        return maxsim_scores(
            queries, self.documents, candidates, self.device,
            chunk_tokens=self._pair_tokens, progress=progress,
        )  # fmt: skip


def resident(documents: TokenParts, device: torch.device) -> TokenParts:
    """Documents on a GPU, if they take no more than half of the memory that it has free; as they
    are, where they do or where it is a CPU. A query by itself would wait for the copy of all."""
    if documents.device.type == "cuda" or not has_room(documents.nbytes, device, RESIDENT):
        return documents
    return documents.held_on(device)


@torch.inference_mode()
def maxsim_scores(
    queries: TokenVectors,
    documents: TokenVectors | TokenParts,
    candidates: NDArray[np.int64],
    device: torch.device | str = "cpu",
    *,
    chunk_tokens: int = 2**22,
    progress: str | None = None,
) -> NDArray[np.float32]:
    """MaxSim of each query and each of its candidates; fp32 ``[Q, C]``.

    Args:
        queries: on the host, without masks.
        documents: stored alike, on the host or on the device.
        candidates: int64 ``[Q, C]``, document rows; -1, and a text without tokens, scores 0.
        device: where to score.
        chunk_tokens: most document tokens that are on the device, and most that are scored at once,
            unless a single document has more.
        progress: label of a progress bar on standard error; None for no bar.

    Raises:
        ValueError: widths or dtypes that differ, candidates of another shape or out of range.
    """
    documents = TokenParts.of(documents)
    _check_sides(queries, documents)
    check_candidates(candidates, queries.num_texts, documents.num_texts)
    device = torch.device(device)
    on_cpu = device.type == "cpu"
    by_query = on_cpu and candidates.shape[1] > 1
    scores = np.zeros(candidates.size, np.float32)
    flat, asked = torch.from_numpy(candidates.ravel()), on_device(device, queries)
    with progress_bar(progress, candidates.size) as advance:
        advance(int((flat < 0).sum()))
        lengths = documents.lengths
        for first, last in ranges_within(documents.cu_seqlens, chunk_tokens, DOCUMENTS_AT_ONCE):
            slots = ((flat >= first) & (flat < last)).nonzero().flatten()
            if not len(slots):
                continue
            chunk = documents.slice(first, last)
            if not on_cpu:
                chunk = on_device(device, chunk)
            owners = slots // candidates.shape[1] if by_query else torch.zeros_like(slots)
            for slot in _together(slots, owners, lengths[flat[slots]], chunk_tokens):
                numbers = slot[: 1 if by_query else None] // candidates.shape[1]
                left = asked.take(numbers.to(device))
                # Gathered on the device; on a CPU, fp32 is made of few at a time.
                right = chunk.take((flat[slot] - first).to(device)).restored()
                found = maxsim_varlen(
                    left.values.to(right.values.dtype), right.values,
                    left.cu_seqlens.int(), right.cu_seqlens.int(),
                    pairing="cross" if by_query else "pairs",
                )  # fmt: skip
                scores[slot.numpy()] = found.flatten().cpu().numpy()
                advance(len(slot))
    return scores.reshape(candidates.shape)


def _together(slots: Tensor, owners: Tensor, lengths: Tensor, most_tokens: int) -> Iterator[Tensor]:
    """Pairs of one owner that are scored at once: on a CPU a query's, whose candidates share a
    product; else any, which share a launch."""
    sizes = owners.unique_consecutive(return_counts=True)[1].tolist()
    for part, tokens in zip(slots.split(sizes), lengths.split(sizes)):
        for start, stop in ranges_within(cu_seqlens_of(tokens), most_tokens, _PAIRS_AT_ONCE):
            yield part[start:stop]


def _check_sides(queries: TokenVectors, documents: TokenParts) -> None:
    asked, stored = (
        f"{_compared_as(dtype)} vectors of {width}"
        for dtype, width in (
            (queries.values.dtype, queries.width), (documents.dtype, documents.width)
        )
    )  # fmt: skip
    if asked != stored:
        raise ValueError(
            f"queries have {asked}, documents {stored}: encode both with the same model and store "
            "them alike"
        )


def _compared_as(stored: torch.dtype) -> str:
    dtype = torch.float16 if stored == torch.float8_e4m3fn else stored
    return str(dtype).removeprefix("torch.")
