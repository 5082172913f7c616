"""Forward of the Sparton paper (its Algorithm 2): a library product for every vocabulary tile, then
one kernel that takes the masked maximum of the tile over the sequence, its position, relu, log1p.

B sequences, S tokens of the longest, D hidden, V vocabulary, C vocabulary rows of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.hybrid_head.logits import check_padded_operands, logit_tiles
from sparton.kernels.launch import Launch, cdiv
from sparton.kernels.segment_max.reduction import greater, log1p


class ReductionConfig(NamedTuple):
    """Tokens and vocabulary entries that a program reads at once, and how it is launched."""

    block_s: int
    block_v: int
    num_warps: int
    num_stages: int


DEFAULT_REDUCTION = ReductionConfig(16, 64, num_warps=4, num_stages=4)


@triton.jit(do_not_specialize=["first_v"])
def _masked_max_kernel(
    logits_ptr, mask_ptr, reps_ptr, argmax_ptr, S, C, V, first_v,
    BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """One sequence, BLOCK_V entries of the tile. The running maximum starts at 0, so what is
    masked or negative never wins; strictly greater replaces, so the first of equal logits stays;
    NaN is passed on."""
    b = tl.program_id(1).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_tile = offs_c < C
    offs_s = tl.arange(0, BLOCK_S)
    best = tl.zeros((BLOCK_S, BLOCK_V), tl.float32)
    step = tl.zeros((BLOCK_S, BLOCK_V), tl.int32)
    for s in tl.range(0, S, BLOCK_S, num_stages=STAGES):
        real = tl.load(mask_ptr + b * S + s + offs_s, s + offs_s < S, 0) != 0
        ptrs = logits_ptr + (b * S + s + offs_s)[:, None] * C + offs_c[None, :]
        logits = tl.load(ptrs, real[:, None] & in_tile[None, :], 0.0).to(tl.float32)
        step = tl.where(logits > best, s, step)
        best = greater(best, logits)
    value = tl.reduce(best, 0, greater)
    entry = b * V + first_v + offs_c
    tl.store(reps_ptr + entry, log1p(value), in_tile)
    if ARGMAX:
        position = tl.where(best == value[None, :], step + offs_s[:, None], S)
        first = tl.min(position, 0)
        tl.store(argmax_ptr + entry, tl.where(first < S, first, 0).to(tl.int64), in_tile)


def hybrid_head_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    argmax: bool = True,
    *,
    tile: int | None = None,
    config: ReductionConfig = DEFAULT_REDUCTION,
) -> tuple[Tensor, Tensor]:
    """Launch the products and the reductions.

    Args:
        hidden: ``[B, S, D]`` float16, bfloat16 or float32.
        weight: ``[V, D]``, the same dtype.
        bias: ``[V]`` any float dtype, or None; rounded to the dtype of ``hidden``.
        mask: bool ``[B, S]``, True at real tokens.
        argmax: also return the winning positions.
        tile: vocabulary rows per product; by default those of
            :func:`~sparton.kernels.hybrid_head.logits.vocabulary_tile`.
        config: how the reduction is launched.

    Returns:
        reps fp32 ``[B, V]`` and the position of each maximum in its sequence, int64 ``[B, V]`` (0
        where no logit is positive), or an empty tensor if ``argmax`` is False.

    Raises:
        ValueError: operands that do not fit together.
    """
    check_padded_operands(hidden, weight, bias, mask)
    if hidden.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"the kernel takes float16, bfloat16 or float32, got {hidden.dtype}")
    (B, S, _), V, mask = hidden.shape, weight.shape[0], mask.contiguous()
    reps = torch.empty(B, V, dtype=torch.float32, device=hidden.device)
    winners = torch.empty((B, V) if argmax else 0, dtype=torch.int64, device=hidden.device)
    if reps.numel() == 0:
        return reps, winners
    if S == 0:
        return reps.zero_(), winners.zero_()
    for first_v, logits in logit_tiles(hidden, weight, bias, tile):
        C = logits.shape[2]
        Launch(
            _masked_max_kernel, (cdiv(C, config.block_v), B), S, C, V, first_v,
            BLOCK_S=config.block_s, BLOCK_V=config.block_v, STAGES=config.num_stages,
            ARGMAX=argmax, num_warps=config.num_warps,
        )(logits, mask, reps, winners)  # fmt: skip
        del logits
    return reps, winners
