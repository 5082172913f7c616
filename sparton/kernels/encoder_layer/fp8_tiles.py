"""Matrices rounded to FP8 (e4m3) as products over their columns and products over their rows read
them, from one pass over memory; and GELU with its gradient, which end in the same way.

T rows, D columns. Tensor cores read both operands of a product in FP8 along the sum, so that the
gradient of a weight, a sum over rows, asks for both of its operands the other way round. A program
has a tile, which it stores as it is and turned. So it knows no whole row, and scales come of limits
that are known before: a row's norm is no less than its largest number. Numbers with an exponent
lose nothing by a limit that is some times too high, until they leave the 18 binary orders of e4m3.

Turning bytes takes longer than the memory does. A thread therefore has the numbers of four rows
that follow one another, rounds them to the four bytes of a word, and words are turned.

Scales are powers of two: a row's own, as it is; turned, where rows lie across, the largest of all.
What is not finite, and so has no limit, leaves nothing finite in its row of a product.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.encoder_layer.fp8_operands import FP8_MULTIPLE, Fp8Rows, Limits
from sparton.kernels.encoder_layer.gelu import approximates, gelu, gelu_slope
from sparton.kernels.encoder_layer.tiles import load_rows, store_rows
from sparton.kernels.launch import Launch, cdiv

# Measured on an H200 with 74,496 rows of 768 to 3,072 columns. GELU has more to keep in registers.
ROWS, GELU_ROWS, COLUMNS, WARPS = 128, 64, 64, 4
# What a limit becomes: the next power of two below the largest e4m3, 448, which is 1.75 of it.
# Within that is what rounding adds: 1/16 to either factor of a product; and GELU's slope, 1.13.
LARGEST = tl.constexpr(256.0)
# The least limit: a scale and its inverse stay normal numbers.
SMALLEST = tl.constexpr(2.0**-100)


class Rounded(NamedTuple):
    """
    Attributes:
        rows: ``[T, D]``.
        turned: ``[D, T]``, see :class:`.Fp8Operand`; None if not wanted.
        sums: fp32 ``[D]``, of the columns before they were rounded; None if not wanted.
    """

    rows: Fp8Rows
    turned: Fp8Rows | None
    sums: Tensor | None


@triton.jit
def _byte(x):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _word(a, b, c, d, APPROXIMATE: tl.constexpr):
    """Four numbers in e4m3, the first in the lowest byte."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return _byte(a) | _byte(b) << 8 | _byte(c) << 16 | _byte(d) << 24


@triton.jit
def _scale(norms, factor_ptr, offset_ptr):
    """The scale of what these norms limit: NaN of NaN, and infinity of infinity."""
    if factor_ptr is not None:
        norms *= tl.load(factor_ptr)
    if offset_ptr is not None:
        norms += tl.load(offset_ptr)
    norms = tl.maximum(norms, SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    above = (norms.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.where(norms == norms, above.to(tl.float32, bitcast=True), norms) / LARGEST


@triton.jit
def _numbers(x_ptr, grad_ptr, bias, t, d, T, APPROXIMATE: tl.constexpr, D: tl.constexpr):
    """fp32 ``[R, C]`` of what is rounded, 0 outside."""
    inside = (t < T)[:, None] & (d < D)[None, :]
    if bias is None:
        x = load_rows(x_ptr, t, d, inside, D)
    elif grad_ptr is None:
        x = gelu(load_rows(x_ptr, t, d, inside, D, outside=float("-inf")) + bias, APPROXIMATE)
    else:
        x = gelu_slope(load_rows(x_ptr, t, d, inside, D) + bias, APPROXIMATE)
        x *= load_rows(grad_ptr, t, d, inside, D)
    return x


@triton.jit
def _scales(norms_ptr, largest, t, T, factor_ptr, offset_ptr):
    """The scales of rows ``[R]``, by norms of their own, or the largest one for all."""
    if norms_ptr is not None:
        scales = _scale(tl.load(norms_ptr + t, t < T, 0.0), factor_ptr, offset_ptr)
    else:
        scales = tl.broadcast_to(largest, t.shape)
    return scales


@triton.jit
def _store(values_ptr, scales_ptr, t, d, x, scales, column, T, D: tl.constexpr):
    inside = (t < T)[:, None] & (d < D)[None, :]
    store_rows(values_ptr, t, d, inside, x * (1.0 / scales)[:, None], D)
    tl.store(scales_ptr + t, scales, (t < T) & (column == 0))


@triton.jit(do_not_specialize=["T"])
def _fp8_tiles_kernel(
    x_ptr, grad_ptr, bias_ptr, norms_ptr, largest_ptr, factor_ptr, offset_ptr,
    values_ptr, scales_ptr, turned_ptr, turned_scales_ptr, sums_ptr, T, padded,
    APPROXIMATE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x; with a bias, GELU of both; with a gradient of that, the gradient of x."""
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    row, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    d = column * COLUMNS + tl.arange(0, COLUMNS)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + d, d < D, 0.0).to(tl.float32)[None, :]
    largest = _scale(tl.load(largest_ptr), factor_ptr, offset_ptr)

    # Rows 0, 4, 8 ... of the tile, rows 1, 5, 9 ... and so on: all that is loaded, before anything
    # is stored, which no load may be moved across.
    word = row * (ROWS // 4) + tl.arange(0, ROWS // 4)
    t = 4 * word
    x0 = _numbers(x_ptr, grad_ptr, bias, t, d, T, APPROXIMATE, D)
    x1 = _numbers(x_ptr, grad_ptr, bias, t + 1, d, T, APPROXIMATE, D)
    x2 = _numbers(x_ptr, grad_ptr, bias, t + 2, d, T, APPROXIMATE, D)
    x3 = _numbers(x_ptr, grad_ptr, bias, t + 3, d, T, APPROXIMATE, D)
    scales0 = _scales(norms_ptr, largest, t, T, factor_ptr, offset_ptr)
    scales1 = _scales(norms_ptr, largest, t + 1, T, factor_ptr, offset_ptr)
    scales2 = _scales(norms_ptr, largest, t + 2, T, factor_ptr, offset_ptr)
    scales3 = _scales(norms_ptr, largest, t + 3, T, factor_ptr, offset_ptr)
    if sums_ptr is not None:
        tl.store(sums_ptr + row.to(tl.int64) * D + d, tl.sum((x0 + x1) + (x2 + x3), 0), d < D)

    # Each row by its own scale.
    _store(values_ptr, scales_ptr, t, d, x0, scales0, column, T, D)
    _store(values_ptr, scales_ptr, t + 1, d, x1, scales1, column, T, D)
    _store(values_ptr, scales_ptr, t + 2, d, x2, scales2, column, T, D)
    _store(values_ptr, scales_ptr, t + 3, d, x3, scales3, column, T, D)

    # All of them by one scale, four rows to a word.
    if turned_ptr is not None:
        inverse, words = 1.0 / largest, padded // 4
        bits = _word(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse, APPROXIMATE)
        places = d.to(tl.int64)[:, None] * words + word[None, :]
        tl.store(turned_ptr + places, tl.trans(bits), (d < D)[:, None] & (word < words)[None, :])
        if row == 0:
            tl.store(turned_scales_ptr + d, tl.broadcast_to(largest, (COLUMNS,)), d < D)


def round_tiles(
    x: Tensor,
    limits: Limits,
    *,
    bias: Tensor | None = None,
    grad: Tensor | None = None,
    turned: bool,
    sums: bool = False,
) -> Rounded:
    """``x [T, D]``, contiguous, in FP8; of a linear layer's product with a ``bias [D]`` what
    :func:`~sparton.kernels.encoder_layer.bias_gelu` gives; with its gradient ``grad [T, D]`` that
    of x. The same bits every time.

    Args:
        limits: of what is rounded.
    """
    T, D = x.shape
    rows = _empty(T, D, T, x.device)
    padded = cdiv(T, FP8_MULTIPLE) * FP8_MULTIPLE
    other = _empty(D, padded, D, x.device) if turned else None
    rows_of_tile = ROWS if bias is None or grad is not None else GELU_ROWS
    blocks = cdiv(T, rows_of_tile)
    parts = torch.empty((blocks, D), dtype=torch.float32, device=x.device) if sums else None
    words = (None, None) if other is None else (other.values.view(torch.int32), other.scales)
    if x.numel():
        Launch(
            _fp8_tiles_kernel, (blocks * cdiv(D, COLUMNS),), T, padded,
            APPROXIMATE=approximates(x), D=D, ROWS=rows_of_tile, COLUMNS=COLUMNS, num_warps=WARPS,
        )(x, grad, bias, *limits, *rows, *words, parts)  # fmt: skip
    return Rounded(rows, other, None if parts is None else parts.sum(0))


def _empty(rows: int, columns: int, scales: int, device: torch.device) -> Fp8Rows:
    return Fp8Rows(
        torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device),
        torch.empty(scales, dtype=torch.float32, device=device),
    )
