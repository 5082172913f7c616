"""Rows rounded to FP8 (e4m3), one scale each, in PyTorch."""

import torch
from torch import Tensor

LARGEST = 448.0
# Of a row's largest absolute value: the scale, its inverse and scaled sums stay finite and normal.
SCALE_BOUNDS = (2.0**-100, 2.0**100)


def padded_size(D: int) -> int:
    """D rounded up to whole 16 bytes of e4m3."""
    return -(-D // 16) * 16


def quantize_rows_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`~sparton.kernels.segment_max.quantize.quantize_rows` returns, for CPU tensors."""
    x = x.float()
    amax = x.nan_to_num(nan=0.0).abs().amax(1, keepdim=True).clamp(*SCALE_BOUNDS)
    scaled = (x * (LARGEST / amax)).clamp(-LARGEST, LARGEST)
    rounded = torch.nn.functional.pad(scaled, (0, padded_size(x.shape[1]) - x.shape[1]))
    return rounded.to(torch.float8_e4m3fn), (amax / LARGEST)[:, 0]
