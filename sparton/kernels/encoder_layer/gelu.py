"""GELU of a linear layer's product, its bias included, and the way back with the bias' gradient.

T rows, D columns of a result. With u = x + bias and F the normal distribution's function, forward
u F(u), backward (F(u) + u F'(u)) grad. F(-|u|) is half the complementary error function of
|u| / sqrt(2), by Abramowitz and Stegun's 7.1.26 (error below 1e-7), whose one exponential is that
of F' too: the error function of CUDA's library takes longer than the memory does.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.encoder_layer.tiles import load_rows, programs_over_rows, store_rows
from sparton.kernels.launch import Launch, cdiv

# Measured on an H200 with 74,496 rows of 3,072 columns.
ROWS, COLUMNS, WARPS = 8, 512, 4
BACKWARD_ROWS, BACKWARD_COLUMNS, BACKWARD_WARPS = 2, 1024, 4
BACKWARD_PROGRAMS = 32  # for each multiprocessor


@triton.jit
def reciprocal(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def exp2(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _tail(u, APPROXIMATE: tl.constexpr):
    """F(-|u|) and exp(-u^2 / 2), fp32."""
    exponential = exp2(u * u * -0.7213475204444817, APPROXIMATE)
    t = reciprocal(1.0 + 0.23164188 * tl.abs(u), APPROXIMATE)  # 0.3275911 / sqrt(2)
    series = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
    series = 0.127414796 + t * (-0.142248368 + t * series)
    return t * series * exponential, exponential


@triton.jit
def gelu(u, APPROXIMATE: tl.constexpr):
    tail, _ = _tail(u, APPROXIMATE)
    # The tail is 0 from 14 on, infinity among it.
    return tl.maximum(u, 0.0) - tl.minimum(tl.abs(u), 16.0) * tail


@triton.jit
def gelu_slope(u, APPROXIMATE: tl.constexpr):
    tail, exponential = _tail(u, APPROXIMATE)
    return tl.where(u < 0, tail, 1.0 - tail) + u * (0.3989422804014327 * exponential)


@triton.jit(do_not_specialize=["T"])
def _gelu_kernel(
    x_ptr, bias_ptr, out_ptr, T,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    t = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = (t < T)[:, None] & (d < D)[None, :]
    bias = tl.load(bias_ptr + d, d < D, 0.0).to(tl.float32)
    u = load_rows(x_ptr, t, d, inside, D) + bias[None, :]
    store_rows(out_ptr, t, d, inside, gelu(u, APPROXIMATE), D)


@triton.jit(do_not_specialize=["T", "programs"])
def _gelu_backward_kernel(
    grad_ptr, x_ptr, bias_ptr, dx_ptr, sum_ptr, T, programs,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th tile of rows; their sum goes to ``sum [programs, D]``."""
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.load(bias_ptr + d, d < D, 0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for lo in range(program * ROWS, T, programs * ROWS):
        t = lo + tl.arange(0, ROWS)
        inside = (t < T)[:, None] & (d < D)[None, :]
        u = load_rows(x_ptr, t, d, inside, D) + bias[None, :]
        dx = load_rows(grad_ptr, t, d, inside, D) * gelu_slope(u, APPROXIMATE)
        store_rows(dx_ptr, t, d, inside, dx, D)
        total += dx
    tl.store(sum_ptr + program.to(tl.int64) * D + d, tl.sum(total, 0), d < D)


def approximates(x: Tensor) -> bool:
    """Whether instructions of NVIDIA's that need no care for tiny numbers are there: they save a
    third of the arithmetic, which otherwise takes longer than the memory."""
    return x.is_cuda and torch.version.hip is None


def _constants(x: Tensor, columns: int) -> dict[str, Any]:
    return {"D": columns, "APPROXIMATE": approximates(x)}


def gelu_forward(x: Tensor, bias: Tensor) -> Tensor:
    """``[T, D]`` in the dtype of ``x [T, D]``; bias ``[D]``. Both contiguous."""
    T, D = x.shape
    out = torch.empty_like(x)
    if x.numel():
        grid = (cdiv(T, ROWS) * cdiv(D, COLUMNS),)
        Launch(
            _gelu_kernel, grid, T, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS, **_constants(x, D)
        )(x, bias, out)  # fmt: skip
    return out


def gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x, in its dtype, and of the bias, in fp32; the same bits every time."""
    T, D = x.shape
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, bias.new_zeros(D, dtype=torch.float32)
    blocks = cdiv(D, BACKWARD_COLUMNS)
    programs = programs_over_rows(x, BACKWARD_ROWS, cdiv(BACKWARD_PROGRAMS, blocks))
    sums = torch.empty((programs, D), dtype=torch.float32, device=x.device)
    Launch(
        _gelu_backward_kernel, (programs * blocks,), T, programs,
        ROWS=BACKWARD_ROWS, COLUMNS=BACKWARD_COLUMNS, num_warps=BACKWARD_WARPS,
        **_constants(x, D),
    )(grad, x, bias, dx, sums)  # fmt: skip
    return dx, sums.sum(0)
