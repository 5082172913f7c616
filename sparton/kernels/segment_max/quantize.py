"""Matrices rounded to FP8 (e4m3) on a GPU, with a scale for each row or one for all."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import Launch, cdiv, next_power_of_2
from sparton.kernels.segment_max.quantize_cpu import LARGEST, SCALE_BOUNDS, padded_size

ELEMENTS = 4096  # of a program
# Programs that look for the largest value of a matrix: a power of 2.
PARTS = 512


@triton.jit
def _largest(x):
    """The largest absolute value, NaN if there is one: its bits are above those of infinity."""
    bits = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)
    return tl.max(bits).to(tl.float32, bitcast=True)


@triton.jit
def _largest_kernel(x_ptr, amax_ptr, size, PARTS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Every PARTS-th block of the elements."""
    part = tl.program_id(0)
    amax = tl.zeros((ELEMENTS,), tl.float32)
    for first in range(part.to(tl.int64) * ELEMENTS, size, PARTS * ELEMENTS):
        offs = first + tl.arange(0, ELEMENTS)
        x = tl.abs(tl.load(x_ptr + offs, offs < size, 0.0).to(tl.float32))
        amax = tl.maximum(amax, x, propagate_nan=tl.PropagateNan.ALL)
    tl.store(amax_ptr + part, _largest(amax))


@triton.jit(do_not_specialize=["R", "S"])
def _quantize_kernel(
    x_ptr, amax_ptr, rounded_ptr, scale_ptr, R, S,
    D: tl.constexpr, PADDED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows, each by its own largest absolute value or all by the largest of PARTS values.
    NaN stays NaN; an infinite element becomes the largest one. S scales are written: R, or 1."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    exists = (rows < R)[:, None]
    x = tl.load(x_ptr + rows[:, None] * D + offs_d, exists & (offs_d < D), 0.0).to(tl.float32)
    if amax_ptr is None:
        amax = tl.max(tl.abs(x), 1)
    else:
        amax = tl.zeros((BLOCK_R,), tl.float32) + _largest(tl.load(amax_ptr + tl.arange(0, PARTS)))
    amax = tl.maximum(amax, LOW, propagate_nan=tl.PropagateNan.ALL)
    amax = tl.minimum(amax, HIGH, propagate_nan=tl.PropagateNan.ALL)
    x *= tl.div_rn(LARGEST, amax)[:, None]
    x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    rounded = x.to(rounded_ptr.dtype.element_ty)
    tl.store(rounded_ptr + rows[:, None] * PADDED + offs_d, rounded, exists & (offs_d < PADDED))
    tl.store(scale_ptr + rows, tl.div_rn(amax, LARGEST), rows < S)


def _quantize(x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    R, D = x.shape
    padded = padded_size(D)
    block_d = next_power_of_2(padded)
    block_r = max(ELEMENTS // block_d, 1)
    rounded = torch.empty(R, padded, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(R if amax is None else 1, dtype=torch.float32, device=x.device)
    if R:
        Launch(
            _quantize_kernel, (cdiv(R, block_r),), R, scale.numel(),
            D=D, PADDED=padded, BLOCK_R=block_r, BLOCK_D=block_d, PARTS=PARTS,
            LOW=SCALE_BOUNDS[0], HIGH=SCALE_BOUNDS[1], LARGEST=LARGEST,
            num_warps=min(max(block_d // 1024, 4), 16),
        )(x, amax, rounded, scale)  # fmt: skip
    return rounded, scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round to e4m3 with one scale per row, its largest absolute value / 448.

    Args:
        x: ``[R, D]`` float16 or bfloat16 on a GPU of compute capability 8.9 or later.

    Returns:
        float8_e4m3fn ``[R, P]``, P being D rounded up to a multiple of 16 (tensor descriptors ask
        for rows of whole 16 bytes) with zeros in the added columns, and the scales, fp32 ``[R]``,
        positive for every row.
    """
    return _quantize(x.contiguous(), None)


def quantize_matrix(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round to e4m3 with one scale, the largest absolute value / 448, found on the device.

    Args:
        x: as for :func:`quantize_rows`, with at least one row.

    Returns:
        float8_e4m3fn ``[R, P]`` as of :func:`quantize_rows`, and the scale, fp32 ``[1]``.
    """
    x = x.contiguous()
    amax = torch.empty(PARTS, dtype=torch.float32, device=x.device)
    Launch(_largest_kernel, (PARTS,), x.numel(), PARTS=PARTS, ELEMENTS=ELEMENTS)(x, amax)
    return _quantize(x, amax)
