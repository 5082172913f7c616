"""Rows rounded to FP8 (e4m3), one scale each, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.segment_max.quantize_cpu import LARGEST, SCALE_BOUNDS, padded_size


@triton.jit
def _quantize_kernel(
    x_ptr, rounded_ptr, scale_ptr,
    D: tl.constexpr, PADDED: tl.constexpr, BLOCK_D: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One row. NaN stays NaN; an infinite element becomes the largest one of its row."""
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + row * D + offs_d, offs_d < D, 0.0).to(tl.float32)
    amax = tl.minimum(tl.maximum(tl.max(tl.abs(x), 0), LOW), HIGH)
    x *= tl.div_rn(LARGEST, amax)
    x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    rounded = x.to(rounded_ptr.dtype.element_ty)
    tl.store(rounded_ptr + row * PADDED + offs_d, rounded, offs_d < PADDED)
    tl.store(scale_ptr + row, tl.div_rn(amax, LARGEST))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round to e4m3 with one scale per row, its largest absolute value / 448.

    Args:
        x: ``[R, D]`` float16 or bfloat16 on a GPU of compute capability 8.9 or later.

    Returns:
        float8_e4m3fn ``[R, P]``, P being D rounded up to a multiple of 16 (tensor descriptors ask
        for rows of whole 16 bytes) with zeros in the added columns, and the scales, fp32 ``[R]``,
        positive for every row.
    """
    x = x.contiguous()
    R, D = x.shape
    padded = padded_size(D)
    rounded = torch.empty(R, padded, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(R, device=x.device)
    if R:
        block_d = triton.next_power_of_2(padded)
        _quantize_kernel[(R,)](
            x, rounded, scale, D=D, PADDED=padded, BLOCK_D=block_d,
            LOW=SCALE_BOUNDS[0], HIGH=SCALE_BOUNDS[1], LARGEST=LARGEST,
            num_warps=min(max(block_d // 1024, 1), 16),
        )  # fmt: skip
    return rounded, scale
