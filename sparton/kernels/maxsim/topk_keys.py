"""Keys that order scores, beside the best ones so far, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.launch import Launch, cdiv

BLOCK = 1024


@triton.jit(do_not_specialize=["N", "kept", "first"])
def _keys_kernel(scores_ptr, best_ptr, keys_ptr, N, kept, first, BLOCK: tl.constexpr):
    q = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = place - kept
    fresh = (n >= 0) & (n < N)
    score = tl.load(scores_ptr + q * N + n, fresh, 0.0)
    score = tl.where(score != score, float("nan"), score)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = ((bits + 1) << 32) - 1 - (first + n.to(tl.int64))
    best = tl.load(best_ptr + q * kept + place, place < kept, 0)
    places = keys_ptr + q * (kept + N) + place
    tl.store(places, tl.where(fresh, key, best), place < kept + N)


@on_its_device
def keys_beside(scores: Tensor, best: Tensor, first: int) -> Tensor:
    """``best`` and then the keys of the scores of documents ``first, first + 1, ...``.

    Args:
        scores: fp32 ``[Q, N]``.
        best: int64 ``[Q, kept]``.
        first: the first document's number.

    Returns:
        int64 ``[Q, kept + N]``.
    """
    scores, best = scores.contiguous(), best.contiguous()
    (Q, N), kept = scores.shape, best.shape[1]
    keys = torch.empty(Q, kept + N, dtype=torch.int64, device=scores.device)
    if keys.numel():
        grid = (Q, cdiv(kept + N, BLOCK))
        Launch(_keys_kernel, grid, N, kept, first, BLOCK=BLOCK)(scores, best, keys)
    return keys
