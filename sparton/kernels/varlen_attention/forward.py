"""Forward: a program owns a block of one sequence's queries in one head, and walks over the keys.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.

Blocks are small: sequences of some hundred tokens, of which retrievers train on thousands at a
time, fill them better than the blocks of 128 that suit long texts, and there are programs enough.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from sparton.kernels.dispatch import is_hopper
from sparton.kernels.launch import Launch, cdiv
from sparton.kernels.varlen_attention.hopper_attention import attention_hopper
from sparton.kernels.varlen_attention.hopper_rings import suits_hopper
from sparton.kernels.varlen_attention.operands import AttentionOperands, strides
from sparton.kernels.varlen_attention.tiles import (
    LOG2_E,
    Tiling,
    constants,
    locate,
    metadata,
    rows_at,
    sees,
    within_reach,
)


def forward_tiling(d: int, max_key: int) -> Tiling:
    """How to launch for heads of width ``d`` and sequences of at most ``max_key`` keys."""
    if max_key <= 32:
        return Tiling(32, 32, num_warps=2, num_stages=1)
    if max_key <= 64:
        return Tiling(64, 64, num_warps=4, num_stages=1)
    if d <= 64:
        return Tiling(64, 32, num_warps=4, num_stages=3)
    return Tiling(64, 64, num_warps=4, num_stages=2)


@triton.jit
def _fold(
    state, q, k_ptrs, v_ptrs, real_k, offs_q, offs_k, scale: tl.constexpr,
    WINDOW: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Fold a tile of keys into the largest score of each query, the sum of its exponentials and its
    mixed values. Without ``real_k`` every query sees every key of the tile."""
    best, total, acc = state
    if real_k is None:
        k, v = tl.load(k_ptrs), tl.load(v_ptrs)
        scores = tl.dot(q, k.T)
    else:
        k, v = tl.load(k_ptrs, real_k[:, None], 0.0), tl.load(v_ptrs, real_k[:, None], 0.0)
        seen = sees(real_k[None, :], offs_q[:, None], offs_k[None, :], WINDOW)
        scores = tl.where(seen, tl.dot(q, k.T), float("-inf"))
    new = tl.max(scores, 1) * scale
    if not ONE_TILE:
        new = tl.maximum(best, new)
        shrink = tl.exp2(best - new)
        total *= shrink
        acc *= shrink[:, None]
    p = tl.exp2(scores * scale - new[:, None])
    total += tl.sum(p, 1)
    return new, total, tl.dot(p.to(v.dtype), v, acc)


# `debug` keeps the assertion, which takes no register more; overflows are not looked for.
@triton.jit(
    debug=True, do_not_specialize=["num_blocks", "Tq", "max_query", "max_key"],
    launch_metadata=metadata(2, 4),
)  # fmt: skip
def _varlen_attention_fwd_kernel(
    query_ptr, key_ptr, value_ptr, query_cu_ptr, key_cu_ptr, out_ptr, lse_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, num_blocks, Tq,
    max_query, max_key,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """ONE_TILE: no sequence has more than BLOCK_K keys, so that no maximum changes."""
    block, head, first_q, num_q, first_k, num_k = locate(query_cu_ptr, key_cu_ptr, num_blocks, H)
    tl.device_assert(num_q <= max_query, "a sequence has more queries than max_query")
    tl.device_assert(num_k <= max_key, "a sequence has more keys than max_key")
    first = block * BLOCK_Q
    if first >= num_q:
        return
    scale: tl.constexpr = SCALE * LOG2_E
    offs_q = first + tl.arange(0, BLOCK_Q)
    offs_k = tl.arange(0, BLOCK_K)
    real_q = (offs_q < num_q)[:, None]
    begin, end = within_reach(first, BLOCK_Q, num_k, WINDOW)
    q_ptrs = rows_at(query_ptr, first_q + first, head, stride_qt, stride_qh, BLOCK_Q, D)
    k_ptrs = rows_at(key_ptr, first_k + begin, head, stride_kt, stride_kh, BLOCK_K, D)
    v_ptrs = rows_at(value_ptr, first_k + begin, head, stride_vt, stride_vh, BLOCK_K, D)
    q = tl.load(q_ptrs, real_q, 0.0)
    # Finite: a query may see no key of the first tile.
    best = tl.full((BLOCK_Q,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    state = (best, total, acc)
    if WINDOW < 0:
        # Whole tiles, of which nothing has to be asked, and what is left.
        whole = 0
        if not ONE_TILE:
            whole = end // BLOCK_K * BLOCK_K
            for _ in range(0, whole, BLOCK_K):
                state = _fold(state, q, k_ptrs, v_ptrs, None, None, None, scale, -1, ONE_TILE)
                k_ptrs += BLOCK_K * stride_kt
                v_ptrs += BLOCK_K * stride_vt
        if whole < end:
            keys = whole + offs_k
            real_k = keys < num_k
            state = _fold(state, q, k_ptrs, v_ptrs, real_k, offs_q, keys, scale, -1, ONE_TILE)
    else:
        for lo in range(begin, end, BLOCK_K):
            keys = lo + offs_k
            real_k = keys < num_k
            state = _fold(state, q, k_ptrs, v_ptrs, real_k, offs_q, keys, scale, WINDOW, ONE_TILE)
            k_ptrs += BLOCK_K * stride_kt
            v_ptrs += BLOCK_K * stride_vt
    best, total, acc = state
    if num_k == 0:
        best = tl.zeros((BLOCK_Q,), tl.float32)
        total = tl.full((BLOCK_Q,), 1.0, tl.float32)
    acc = acc / total[:, None]
    out_ptrs = rows_at(out_ptr, first_q + first, head, H * D, D, BLOCK_Q, D)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), real_q)
    if lse_ptr is not None:
        lse_ptrs = lse_ptr + head.to(tl.int64) * Tq + first_q + offs_q
        tl.store(lse_ptrs, best + tl.log2(total), offs_q < num_q)


def varlen_attention_forward(
    operands: AttentionOperands, *, lse: bool = True, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor | None]:
    """Launch the forward.

    Args:
        operands: of :func:`~sparton.kernels.varlen_attention.operands.attention_operands`.
        lse: also return what the backward needs.
        tiling: how to launch; see :func:`forward_tiling` for the default, in the place of which
            Hopper has a kernel of its own for most.

    Returns:
        The mixed values ``[Tq, H, d]``, contiguous, in the dtype of the operands; and if wanted the
        logarithm to base 2 of the sums of exponentials, fp32 ``[H, Tq]``, 0 where there are no
        keys.

    Raises:
        ValueError: tensors that are not on a GPU.
    """
    if not operands.query.is_cuda and isinstance(_varlen_attention_fwd_kernel, JITFunction):
        raise ValueError(
            f"the kernels need a GPU, got {operands.query.device}; varlen_attention_reference "
            "does without"
        )
    query, max_key = operands.query, operands.max_key
    Tq, H, d = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sums = torch.empty((H, Tq), dtype=torch.float32, device=query.device) if lse else None
    if out.numel() == 0:
        return out, sums
    if tiling is None and is_hopper(query.device) and suits_hopper(operands):
        attention_hopper(operands, out, sums)
        return out, sums
    tiling = tiling or forward_tiling(d, max_key)
    num_blocks = cdiv(operands.max_query, tiling.block_q)
    Launch(
        _varlen_attention_fwd_kernel, (num_blocks * operands.num_problems,),
        *strides(*operands[:3]), num_blocks, Tq, operands.max_query, max_key,
        ONE_TILE=max_key <= tiling.block_k, sanitize_overflow=False,
        **constants(operands, tiling),
    )(*operands[:5], out, sums)  # fmt: skip
    return out, sums
