"""Forward of the SPLADE head with its search for the maximum in FP8.

N sequences, T packed tokens, D hidden, V vocabulary.

The operands are rounded to e4m3, tokens with one scale for all of them (e4m3 has exponents of its
own, and a factor for every logit would cost a sixth of the time) and rows of the vocabulary with
one each. The fused kernel finds the winning tokens
on them, and the logits of the winners are then computed again from the 16-bit operands. Values are
those of the winning tokens, exact up to the order of summation; rounding can only decide between
tokens whose logits nearly tie. The work of the second step follows the number of active entries.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.launch import Launch, cdiv, next_power_of_2
from sparton.kernels.segment_max.forward import Config, segment_max_forward
from sparton.kernels.segment_max.operands import check_fp8, check_operands
from sparton.kernels.segment_max.quantize import quantize_operands
from sparton.kernels.segment_max.reduction import log1p, positive_part
from sparton.kernels.splade_head.fp8_cpu import search_bias


class RescoreConfig(NamedTuple):
    """How the work is cut; all but ``num_warps`` and ``num_stages`` are powers of 2.

    Attributes:
        block_n, block_v: sequences and vocabulary rows whose active entries a program lists.
        block_e: entries that it computes at once.
        block_d: hidden units read at once; None: by the hidden size.
    """

    block_n: int = 16
    block_v: int = 64
    block_e: int = 16
    block_d: int | None = None
    num_warps: int = 4
    num_stages: int = 1


@triton.jit(do_not_specialize=["N"])
def _rescore_kernel(
    hidden_ptr, weight_ptr, bias_ptr, reps_ptr, argmax_ptr, list_ptr, N, V,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr, TWICE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The active entries of BLOCK_N sequences and BLOCK_V vocabulary rows: list them, row by row
    of the vocabulary, then compute their logits, BLOCK_E at once."""
    first_v = tl.program_id(0).to(tl.int64) * BLOCK_V
    first_n = tl.program_id(1).to(tl.int64) * BLOCK_N
    rows, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V)
    inside = (first_n + rows < N)[:, None] & (first_v + columns < V)[None, :]
    reps = tl.load(reps_ptr + (first_n + rows)[:, None] * V + first_v + columns, inside, 0.0)
    ones = (reps > 0).to(tl.int32)
    counts = tl.sum(ones, 0)
    total = tl.sum(counts, 0)
    if total == 0:
        return
    slots = (tl.cumsum(counts, 0) - counts)[None, :] + tl.cumsum(ones, 0) - 1
    program = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    list_ptr += program * BLOCK_N * BLOCK_V
    entries = rows[:, None] * BLOCK_V + columns[None, :]
    tl.store(list_ptr + slots, entries, reps > 0)
    tl.debug_barrier()
    for first in tl.range(0, total, BLOCK_E, num_stages=NUM_STAGES):
        offs_e = first + tl.arange(0, BLOCK_E)
        mask = offs_e < total
        entry = tl.load(list_ptr + offs_e, mask, 0).to(tl.int64)
        v = first_v + entry % BLOCK_V
        place = (first_n + entry // BLOCK_V) * V + v
        token = tl.load(argmax_ptr + place, mask, 0).to(tl.int64)
        acc = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
        for d in tl.static_range(0, D, BLOCK_D):
            offs_d = d + tl.arange(0, BLOCK_D)
            present = mask[:, None] & (offs_d < D)[None, :]
            h = tl.load(hidden_ptr + token[:, None] * D + offs_d[None, :], present, 0.0)
            w = tl.load(weight_ptr + v[:, None] * D + offs_d[None, :], present, 0.0)
            acc += h.to(tl.float32) * w.to(tl.float32)
        logit = tl.sum(acc, 1)
        if bias_ptr is not None:
            logit += tl.load(bias_ptr + v, mask, 0.0).to(tl.float32)
        value = log1p(positive_part(logit))
        if TWICE:
            value = log1p(value)
        tl.store(reps_ptr + place, value, mask)


def _rescore_block(D: int) -> int:
    """Units per step: whole blocks where D allows."""
    whole = (block for block in (256, 128) if D % block == 0)
    return next(whole, min(next_power_of_2(D), 256))


@on_its_device
def rescore(
    reps: Tensor,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str = "relu",
    config: RescoreConfig | None = None,
) -> None:
    """Replace each positive representation by that of its winning token, in place.

    Args:
        reps, argmax: fp32 and int32 ``[N, V]``, from the forward. Entries that are not positive
            stay as they are; one whose logit turns out not to be positive becomes 0.
        hidden: ``[T, D]`` float16 or bfloat16.
        weight: ``[V, D]``, the same dtype.
        bias: ``[V]`` any float dtype, or None.
        activation: "relu" or "log1p_relu".
        config: how the work is cut. The last bits depend on it.
    """
    (N, V), D = reps.shape, hidden.shape[1]
    config = config or RescoreConfig()
    hidden, weight = hidden.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    grid = (cdiv(V, config.block_v), cdiv(N, config.block_n))
    room = grid[0] * grid[1] * config.block_n * config.block_v
    entries = torch.empty(room, dtype=torch.int32, device=reps.device)
    Launch(
        _rescore_kernel, grid, N, V,
        D=D, BLOCK_N=config.block_n, BLOCK_V=config.block_v, BLOCK_E=config.block_e,
        BLOCK_D=config.block_d or _rescore_block(D),
        TWICE=activation == "log1p_relu", NUM_STAGES=config.num_stages, num_warps=config.num_warps,
    )(hidden, weight, bias, reps, argmax, entries)  # fmt: skip


@on_its_device
def splade_head_forward_fp8(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    argmax: bool = True,
    activation: str = "relu",
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of :func:`~sparton.kernels.segment_max.forward.segment_max_forward`
    (``hidden`` and ``weight`` in float16 or bfloat16), with winners found in FP8.

    The search raises the bias by a margin (see fp8_cpu.py): entries that rounding might make
    negative are computed again as well. What stays negative by more than the margin is 0.

    Raises:
        ValueError: operands that do not fit together or that FP8 does not serve.
    """
    check_operands(hidden, weight, bias, cu_seqlens)
    check_fp8(hidden)
    (T, D), V = hidden.shape, weight.shape[0]
    norms = hidden.new_empty(T, dtype=torch.float32), weight.new_empty(V, dtype=torch.float32)
    hidden8, weight8, scales = quantize_operands(hidden, weight, by="weight_row", norms=norms)
    raised = search_bias(*norms, D, bias)
    reps, winners = segment_max_forward(
        hidden8, weight8, raised, cu_seqlens, scales=scales, config=config
    )
    del hidden8, weight8
    if reps.numel() and hidden.shape[0]:
        rescore(reps, winners, hidden, weight, bias, activation=activation)
    return reps, winners if argmax else winners.new_empty(0)
