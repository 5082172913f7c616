"""Matrices rounded to FP8 (e4m3) as products over their columns and products over their rows read
them, from one pass over memory; and GELU with its gradient, which end in the same way.

T rows, D columns. Tensor cores read both operands of a product in FP8 along the sum, so that the
gradient of a weight, a sum over rows, asks for both of its operands the other way round. A program
has a tile, which it stores as it is and turned. So it knows no whole row, and scales come of limits
that are known before: a row's norm is no less than its largest number. Numbers with an exponent
lose nothing by a limit that is some times too high, until they leave the 18 binary orders of e4m3.

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

# Measured on an H200 with 74,496 rows of 768 to 3,072 columns.
ROWS, COLUMNS, WARPS = 128, 64, 4
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
def _scale(norms, factor_ptr, offset_ptr):
    """Of what these norms limit: NaN of NaN, and infinity of infinity."""
    if factor_ptr is not None:
        norms *= tl.load(factor_ptr)
    if offset_ptr is not None:
        norms += tl.load(offset_ptr)
    norms = tl.maximum(norms, SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    above = (norms.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.where(norms == norms, above.to(tl.float32, bitcast=True), norms) / LARGEST


@triton.jit(do_not_specialize=["T"])
def _fp8_tiles_kernel(
    x_ptr, grad_ptr, bias_ptr, norms_ptr, largest_ptr, factor_ptr, offset_ptr,
    values_ptr, scales_ptr, turned_ptr, turned_scales_ptr, sums_ptr, T, padded,
    APPROXIMATE: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x; with a bias, GELU of both; with a gradient of that, the gradient of x."""
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    row, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    t = row * ROWS + tl.arange(0, ROWS)
    d = column * COLUMNS + tl.arange(0, COLUMNS)
    inside = (t < T)[:, None] & (d < D)[None, :]
    x = load_rows(x_ptr, t, d, inside, D)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + d, d < D, 0.0).to(tl.float32)[None, :]
        if grad_ptr is not None:
            x = load_rows(grad_ptr, t, d, inside, D) * gelu_slope(x, APPROXIMATE)
        else:
            x = gelu(x, APPROXIMATE)
    if sums_ptr is not None:
        tl.store(sums_ptr + row.to(tl.int64) * D + d, tl.sum(tl.where(inside, x, 0.0), 0), d < D)
    scale = _scale(tl.load(norms_ptr + t, t < T, 0.0), factor_ptr, offset_ptr)
    store_rows(values_ptr, t, d, inside, x * (1.0 / scale)[:, None], D)
    if column == 0:
        tl.store(scales_ptr + t, scale, t < T)
    if turned_ptr is not None:
        largest = _scale(tl.load(largest_ptr), factor_ptr, offset_ptr)
        turned = (x * (1.0 / largest)).to(values_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
        # Zeros behind the last row, and made of bits: ptxas crashes on the rounding of constants.
        turned = tl.trans(tl.where((t < T)[:, None], turned, 0))
        places = (d < D)[:, None] & (t < padded)[None, :]
        tl.store(turned_ptr + d.to(tl.int64)[:, None] * padded + t[None, :], turned, places)
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
    blocks = cdiv(T, ROWS)
    parts = torch.empty((blocks, D), dtype=torch.float32, device=x.device) if sums else None
    turned_bits = (None, None) if other is None else (other.values.view(torch.uint8), other.scales)
    if x.numel():
        Launch(
            _fp8_tiles_kernel, (blocks * cdiv(D, COLUMNS),), T, padded,
            APPROXIMATE=approximates(x), D=D, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )(x, grad, bias, *limits, *rows, *turned_bits, parts)  # fmt: skip
    return Rounded(rows, other, None if parts is None else parts.sum(0))


def _empty(rows: int, columns: int, scales: int, device: torch.device) -> Fp8Rows:
    return Fp8Rows(
        torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device),
        torch.empty(scales, dtype=torch.float32, device=device),
    )
