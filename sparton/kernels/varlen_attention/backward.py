"""Backward from the log-sum-exp of the forward; the same bits every time, nothing is added in
memory.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.

With p the weights and delta the products <dout, out> of each query, ds = p * (dout v^T - delta),
dquery = scale * ds key, dkey = scale * ds^T query and dvalue = p^T dout. Two kernels compute the
weights each for themselves: one holds a block of queries, the other one of keys.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.dispatch import is_hopper
from sparton.kernels.launch import Launch, cdiv
from sparton.kernels.varlen_attention.hopper_backward import attention_backward_hopper
from sparton.kernels.varlen_attention.hopper_rings import suits_hopper
from sparton.kernels.varlen_attention.operands import AttentionOperands, strides, unit_stride
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


class BackwardTiling(NamedTuple):
    """How the work is cut; the order of summation, hence the last bits, depend on it.

    Attributes:
        queries: the kernel of dquery.
        keys: that of dkey and dvalue.
    """

    queries: Tiling
    keys: Tiling


def backward_tiling(d: int) -> BackwardTiling:
    """How to launch for heads of width ``d``."""
    queries = Tiling(64, 32, num_warps=4, num_stages=2 if d > 64 else 3)
    return BackwardTiling(queries, keys=Tiling(32, 64, num_warps=4, num_stages=2))


@triton.jit(do_not_specialize=["num_blocks", "Tq"], launch_metadata=metadata(3, 6))
def _varlen_attention_dquery_kernel(
    query_ptr, key_ptr, value_ptr, query_cu_ptr, key_cu_ptr, out_ptr, lse_ptr, grad_ptr,
    delta_ptr, dquery_ptr, norms_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh,
    stride_dt, num_blocks, Tq,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q queries of a sequence; also stores their delta."""
    block, head, first_q, num_q, first_k, num_k = locate(query_cu_ptr, key_cu_ptr, num_blocks, H)
    first = block * BLOCK_Q
    if first >= num_q:
        return
    offs_q = first + tl.arange(0, BLOCK_Q)
    offs_k = tl.arange(0, BLOCK_K)
    real_q = offs_q < num_q
    row = head.to(tl.int64) * Tq + first_q + offs_q
    start = first_q + first
    begin, end = within_reach(first, BLOCK_Q, num_k, WINDOW)
    q_ptrs = rows_at(query_ptr, start, head, stride_qt, stride_qh, BLOCK_Q, D)
    g_ptrs = rows_at(grad_ptr, start, head, stride_gt, stride_gh, BLOCK_Q, D)
    o_ptrs = rows_at(out_ptr, start, head, H * D, D, BLOCK_Q, D)
    k_ptrs = rows_at(key_ptr, first_k + begin, head, stride_kt, stride_kh, BLOCK_K, D)
    v_ptrs = rows_at(value_ptr, first_k + begin, head, stride_vt, stride_vh, BLOCK_K, D)
    q = tl.load(q_ptrs, real_q[:, None], 0.0)
    g = tl.load(g_ptrs, real_q[:, None], 0.0)
    out = tl.load(o_ptrs, real_q[:, None], 0.0)
    lse = tl.load(lse_ptr + row, real_q, 0.0)
    delta = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + row, delta, real_q)
    dq = tl.zeros((BLOCK_Q, D), tl.float32)
    for lo in range(begin, end, BLOCK_K):
        real_k = lo + offs_k < num_k
        k = tl.load(k_ptrs, real_k[:, None], 0.0)
        v = tl.load(v_ptrs, real_k[:, None], 0.0)
        p = tl.exp2(tl.dot(q, k.T) * (SCALE * LOG2_E) - lse[:, None])
        seen = sees(real_k[None, :], offs_q[:, None], (lo + offs_k)[None, :], WINDOW)
        p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(g, v.T) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
        k_ptrs += BLOCK_K * stride_kt
        v_ptrs += BLOCK_K * stride_vt
    dq_ptrs = rows_at(dquery_ptr, start, head, stride_dt, D, BLOCK_Q, D)
    dq *= SCALE
    tl.store(dq_ptrs, dq.to(dquery_ptr.dtype.element_ty), real_q[:, None])
    if norms_ptr is not None:
        tl.store(norms_ptr + row, tl.sqrt_rn(tl.sum(dq * dq, 1)), real_q)


@triton.jit(do_not_specialize=["num_blocks", "Tq", "Tk"], launch_metadata=metadata(5, 8))
def _varlen_attention_dkey_kernel(
    query_ptr, key_ptr, value_ptr, query_cu_ptr, key_cu_ptr, lse_ptr, grad_ptr, delta_ptr,
    dkey_ptr, dvalue_ptr, key_norms_ptr, value_norms_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh,
    stride_dt, num_blocks, Tq, Tk,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_K keys of a sequence."""
    block, head, first_q, num_q, first_k, num_k = locate(query_cu_ptr, key_cu_ptr, num_blocks, H)
    first = block * BLOCK_K
    if first >= num_k:
        return
    offs_q = tl.arange(0, BLOCK_Q)
    offs_k = first + tl.arange(0, BLOCK_K)
    real_k = offs_k < num_k
    begin, end = within_reach(first, BLOCK_K, num_q, WINDOW)
    row = head.to(tl.int64) * Tq + first_q + offs_q
    start = first_k + first
    k_ptrs = rows_at(key_ptr, start, head, stride_kt, stride_kh, BLOCK_K, D)
    v_ptrs = rows_at(value_ptr, start, head, stride_vt, stride_vh, BLOCK_K, D)
    q_ptrs = rows_at(query_ptr, first_q + begin, head, stride_qt, stride_qh, BLOCK_Q, D)
    g_ptrs = rows_at(grad_ptr, first_q + begin, head, stride_gt, stride_gh, BLOCK_Q, D)
    k = tl.load(k_ptrs, real_k[:, None], 0.0)
    v = tl.load(v_ptrs, real_k[:, None], 0.0)
    dk = tl.zeros((BLOCK_K, D), tl.float32)
    dv = tl.zeros((BLOCK_K, D), tl.float32)
    for lo in range(begin, end, BLOCK_Q):
        real_q = lo + offs_q < num_q
        q = tl.load(q_ptrs, real_q[:, None], 0.0)
        g = tl.load(g_ptrs, real_q[:, None], 0.0)
        lse = tl.load(lse_ptr + row + lo, real_q, float("inf"))  # no weight
        delta = tl.load(delta_ptr + row + lo, real_q, 0.0)
        p = tl.exp2(tl.dot(k, q.T) * (SCALE * LOG2_E) - lse[None, :])
        if WINDOW >= 0:
            p = tl.where(tl.abs(offs_k[:, None] - (lo + offs_q)[None, :]) <= WINDOW, p, 0.0)
        dv = tl.dot(p.to(g.dtype), g, dv)
        ds = (p * (tl.dot(v, g.T) - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        q_ptrs += BLOCK_Q * stride_qt
        g_ptrs += BLOCK_Q * stride_gt
    dk_ptrs = rows_at(dkey_ptr, start, head, stride_dt, D, BLOCK_K, D)
    dv_ptrs = rows_at(dvalue_ptr, start, head, stride_dt, D, BLOCK_K, D)
    dk *= SCALE
    tl.store(dk_ptrs, dk.to(dkey_ptr.dtype.element_ty), real_k[:, None])
    tl.store(dv_ptrs, dv.to(dvalue_ptr.dtype.element_ty), real_k[:, None])
    if key_norms_ptr is not None:
        row = head.to(tl.int64) * Tk + first_k + offs_k
        tl.store(key_norms_ptr + row, tl.sqrt_rn(tl.sum(dk * dk, 1)), real_k)
        tl.store(value_norms_ptr + row, tl.sqrt_rn(tl.sum(dv * dv, 1)), real_k)


def varlen_attention_backward(
    grad: Tensor,
    operands: AttentionOperands,
    out: Tensor,
    lse: Tensor,
    *,
    gradients: tuple[Tensor, Tensor, Tensor] | None = None,
    norms: Tensor | None = None,
    tiling: BackwardTiling | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``sum(grad * out)``.

    Args:
        grad: upstream gradient ``[Tq, H, d]``, read in place where its last stride is 1.
        operands: as for the forward.
        out, lse: what the forward returned.
        gradients: where to write: tensors of the results' shapes and of one token stride, heads
            and their entries side by side. None makes contiguous ones.
        norms: fp32 ``[3, H, T]``, contiguous, where to write those of each token's gradients of
            query, key and value, head by head, where Tq and Tk are both T.
        tiling: how the work is cut; see :func:`backward_tiling` for the default, in the place of
            which Hopper has kernels of its own for most.

    Returns:
        dquery ``[Tq, H, d]``, dkey and dvalue ``[Tk, H, d]``. Sums run in fp32 in a fixed order;
        the results are in the dtype of the operands.

    Raises:
        ValueError: shapes that the forward did not return.
    """
    query, key = operands.query, operands.key
    Tq, H, d = query.shape
    if not grad.shape == out.shape == query.shape or lse.shape != (H, Tq):
        raise ValueError(
            f"grad and out must be [Tq, H, d] = {tuple(query.shape)} and lse [H, Tq], got "
            f"{tuple(grad.shape)}, {tuple(out.shape)} and {tuple(lse.shape)}"
        )
    grad, out = unit_stride(grad), out.contiguous()
    if gradients is None:
        dquery, dkey, dvalue = (
            torch.empty(shape, dtype=query.dtype, device=query.device)
            for shape in (query.shape, key.shape, key.shape)
        )
        gradients = (dquery, dkey, dvalue)
    asked = (None,) * 3 if norms is None else norms.unbind(0)
    if query.numel() == 0 or key.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        if norms is not None:
            norms.zero_()
    elif tiling is None and is_hopper(query.device) and suits_hopper(operands, grad, out):
        attention_backward_hopper(operands, (out, lse, grad), gradients, asked)
    else:
        _launch_both(operands, (out, lse, grad), gradients, asked, tiling or backward_tiling(d))
    return gradients


def _launch_both(
    operands: AttentionOperands,
    given: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    norms: Sequence[Tensor | None],
    tiling: BackwardTiling,
) -> None:
    out, lse, grad = given
    dquery, dkey, dvalue = gradients
    Tq, problems = operands.query.shape[0], operands.num_problems
    layout, delta = (*strides(*operands[:3], grad), dquery.stride(0)), torch.empty_like(lse)
    blocks = cdiv(operands.max_query, tiling.queries.block_q)
    Launch(
        _varlen_attention_dquery_kernel, (problems * blocks,), *layout, blocks, Tq,
        **constants(operands, tiling.queries),
    )(*operands[:5], out, lse, grad, delta, dquery, norms[0])  # fmt: skip
    blocks = cdiv(operands.max_key, tiling.keys.block_k)
    Launch(
        _varlen_attention_dkey_kernel, (problems * blocks,), *layout, blocks, Tq, len(dkey),
        **constants(operands, tiling.keys),
    )(*operands[:5], lse, grad, delta, dkey, dvalue, *norms[1:])  # fmt: skip
