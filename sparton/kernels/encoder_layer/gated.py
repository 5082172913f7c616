"""GELU or SiLU of one matrix, times another: halves of a product, or products of their own.

T rows, D columns of a result. With u the one, v the other and a the activation, forward a(u) v,
backward a'(u) v grad and a(u) grad. SiLU is u s with s = 1 / (1 + exp(-u)), and its slope
s (1 + u (1 - s)).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.encoder_layer.gelu import approximates, exp2, gelu, gelu_slope, reciprocal
from sparton.kernels.encoder_layer.tiles import load_rows, store_rows
from sparton.kernels.launch import Launch, cdiv

# A common divisor of ModernBERT's columns, 1,152, and others'.
ROWS, COLUMNS, WARPS = 16, 128, 4


@triton.jit
def _sigmoid(u, APPROXIMATE: tl.constexpr):
    return reciprocal(1.0 + exp2(u * -1.4426950408889634, APPROXIMATE), APPROXIMATE)


@triton.jit
def _activation(u, ACTIVATION: tl.constexpr, APPROXIMATE: tl.constexpr):
    if ACTIVATION == "silu":
        return u * _sigmoid(u, APPROXIMATE)
    return gelu(u, APPROXIMATE)


@triton.jit
def _slope(u, ACTIVATION: tl.constexpr, APPROXIMATE: tl.constexpr):
    if ACTIVATION == "silu":
        s = _sigmoid(u, APPROXIMATE)
        return s * (1.0 + u * (1.0 - s))
    return gelu_slope(u, APPROXIMATE)


@triton.jit(do_not_specialize=["T"])
def _gated_kernel(
    u_ptr, v_ptr, out_ptr, T,
    ACTIVATION: tl.constexpr, APPROXIMATE: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr,
    OFFSET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of u and v lie STRIDE apart, and those of v begin at OFFSET."""
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    t = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = (t < T)[:, None] & (d < D)[None, :]
    u = load_rows(u_ptr, t, d, inside, STRIDE)
    v = load_rows(v_ptr, t, OFFSET + d, inside, STRIDE)
    store_rows(out_ptr, t, d, inside, _activation(u, ACTIVATION, APPROXIMATE) * v, D)


@triton.jit(do_not_specialize=["T"])
def _gated_backward_kernel(
    grad_ptr, u_ptr, v_ptr, du_ptr, dv_ptr, T,
    ACTIVATION: tl.constexpr, APPROXIMATE: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr,
    OFFSET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    t = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = (t < T)[:, None] & (d < D)[None, :]
    u = load_rows(u_ptr, t, d, inside, STRIDE)
    v = load_rows(v_ptr, t, OFFSET + d, inside, STRIDE)
    grad = load_rows(grad_ptr, t, d, inside, D)
    du = grad * v * _slope(u, ACTIVATION, APPROXIMATE)
    dv = grad * _activation(u, ACTIVATION, APPROXIMATE)
    store_rows(du_ptr, t, d, inside, du, STRIDE)
    store_rows(dv_ptr, t, OFFSET + d, inside, dv, STRIDE)


def gated_forward(u: Tensor, v: Tensor | None, activation: str) -> Tensor:
    """``[T, D]`` in the dtype of u.

    Args:
        u: ``[T, 2 D]``, both halves of a product, or ``[T, D]`` beside ``v``; contiguous.
        v: ``[T, D]``, contiguous, in the dtype of u.
        activation: "gelu" or "silu", of u or of its first half.
    """
    columns = u.shape[1] // 2 if v is None else u.shape[1]
    out = torch.empty((u.shape[0], columns), dtype=u.dtype, device=u.device)
    _launch(_gated_kernel, activation, v is None, out, u, u if v is None else v, out)
    return out


def gated_backward(
    grad: Tensor, u: Tensor, v: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None]:
    """The gradients of u and v, in their dtype, of an upstream gradient ``[T, D]``."""
    du = torch.empty_like(u)
    other, dother = (u, du) if v is None else (v, torch.empty_like(v))
    _launch(_gated_backward_kernel, activation, v is None, grad, grad, u, other, du, dother)
    return du, None if v is None else dother


def _launch(kernel: Any, activation: str, joint: bool, like: Tensor, *tensors: Tensor) -> None:
    T, D = like.shape
    if like.numel():
        grid = (cdiv(T, ROWS) * cdiv(D, COLUMNS),)
        stride, offset = (2 * D, D) if joint else (D, 0)
        Launch(
            kernel, grid, T, ACTIVATION=activation, APPROXIMATE=approximates(like), D=D,
            STRIDE=stride, OFFSET=offset, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )(*tensors)  # fmt: skip
