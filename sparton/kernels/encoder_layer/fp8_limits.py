"""Norms of the rows of a matrix, and the largest of them, by which it is rounded to FP8.

T rows, D columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.encoder_layer.fp8_operands import Limits, unknown_limits
from sparton.kernels.encoder_layer.tiles import load_rows
from sparton.kernels.launch import Launch, cdiv

ROWS, COLUMNS, WARPS = 8, 256, 4


@triton.jit
def store_norms(ptr, t, squares, T):
    """Norms ``[R]`` of rows with these sums of squares, and stored."""
    norms = tl.sqrt_rn(squares)
    tl.store(ptr + t, norms, t < T)
    return norms


@triton.jit
def raise_largest(ptr, norms):
    """From 0 or more to the largest of these. What is not negative is in the order of its bits, and
    NaN last."""
    largest = tl.max(norms.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.atomic_max(ptr.to(tl.pointer_type(tl.int32), bitcast=True), largest, sem="relaxed")


@triton.jit(do_not_specialize=["T"])
def _norms_kernel(
    x_ptr, norms_ptr, largest_ptr, T, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for lo in tl.static_range(0, D, COLUMNS):
        d = lo + tl.arange(0, COLUMNS)
        x = load_rows(x_ptr, t, d, (t < T)[:, None] & (d < D)[None, :], D)
        squares += x * x
    raise_largest(largest_ptr, store_norms(norms_ptr, t, tl.sum(squares, 1), T))


def limits_of(x: Tensor) -> Limits:
    """The limits of ``x [T, D]`` of any float dtype, contiguous."""
    T, D = x.shape
    limits = unknown_limits(x)
    limits.largest.zero_()
    if x.numel():
        Launch(
            _norms_kernel, (cdiv(T, ROWS),), T, D=D, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
        )(x, limits.norms, limits.largest)
    return limits
