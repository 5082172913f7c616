"""Exact search over token vectors by MaxSim.

N documents, Q queries, C candidates of a query, T tokens, E width of a vector, K results per query.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.kernels.maxsim import maxsim_varlen
from sparton.packing import cu_seqlens_of, ranges_within
from sparton.representations import TokenVectors
from sparton.retrieval.indexes.late_interaction import (
    DOCUMENTS_AT_ONCE,
    LateInteractionIndex,
    check_candidates,
    on_device,
)
from sparton.retrieval.progress import progress_bar

_PAIRS_AT_ONCE = 65_536


class MultiVectorIndex(LateInteractionIndex[TokenVectors]):
    """Exact search by MaxSim; see
    :class:`~sparton.retrieval.indexes.late_interaction.LateInteractionIndex`.

    The documents stay in the host's memory; chunks of them pass through the device once in a
    search, so that its working memory is bounded (about 0.5 GB on a CPU and 4 GB on a GPU) whatever
    the number of documents and queries. Queries are stored in the dtype of the documents.

    Args:
        documents: N texts on the host, without a mask.
        device: where to score.
        chunk_tokens: most tokens of a chunk, unless a single document has more.
    """

    exact = True

    def __init__(
        self,
        documents: TokenVectors,
        device: torch.device | str = "cpu",
        *,
        chunk_tokens: int | None = None,
    ) -> None:
        on_gpu = torch.device(device).type == "cuda"
        tokens = chunk_tokens or (2**22 if on_gpu else 2**18)
        super().__init__(documents.cu_seqlens, device, tokens, 512 if on_gpu else 128)
        self.documents = documents
        held = (documents.values, documents.cu_seqlens, self._rows, self._ends)
        self.nbytes = sum(each.nbytes for each in held)

    def _check(self, queries: TokenVectors) -> None:
        _check_sides(queries, self.documents)

    def _chunk(self, first: int, last: int) -> TokenVectors:
        filled = TokenVectors(self.documents.values, self._ends)
        return on_device(self.device, filled.slice(first, last))

    def _scores(self, queries: TokenVectors, documents: TokenVectors) -> Tensor:
        bounds = queries.cu_seqlens, documents.cu_seqlens
        return maxsim_varlen(queries.values, documents.values, *bounds)

    def _candidate_scores(
        self, queries: TokenVectors, candidates: NDArray[np.int64], progress: str | None
    ) -> NDArray[np.float32]:
        return maxsim_scores(
            queries, self.documents, candidates, self.device,
            chunk_tokens=self._chunk_tokens, progress=progress,
        )  # fmt: skip


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
    check_candidates(candidates, queries.num_texts, documents.num_texts)
    device = torch.device(device)
    scores = np.zeros(candidates.size, np.float32)
    flat, asked = torch.from_numpy(candidates.ravel()), on_device(device, queries)
    with progress_bar(progress, candidates.size) as advance:
        advance(int((flat < 0).sum()))
        for first, last in ranges_within(documents.cu_seqlens, chunk_tokens, DOCUMENTS_AT_ONCE):
            chunk = on_device(device, documents.slice(first, last))
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
