"""Matrices rounded to FP8 (e4m3), in PyTorch."""

from typing import Literal

import torch
from torch import Tensor

LARGEST = 448.0
# Of a largest absolute value: the scale, its inverse and scaled sums stay finite and normal.
SCALE_BOUNDS = (2.0**-100, 2.0**100)

By = Literal["row", "matrix"]
Quantized = tuple[Tensor, Tensor, tuple[Tensor | None, Tensor]]


def padded_size(D: int) -> int:
    """D rounded up to whole 16 bytes of e4m3."""
    return -(-D // 16) * 16


def _quantize(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """``amax``: of each row or of all, ``[R, 1]`` or ``[1, 1]``, as the scales are then."""
    amax = amax.clamp(*SCALE_BOUNDS)
    # A number / a tensor is the number * the tensor's reciprocal, which is rounded twice.
    scaled = (x * (torch.full_like(amax, LARGEST) / amax)).clamp(-LARGEST, LARGEST)
    rounded = torch.nn.functional.pad(scaled, (0, padded_size(x.shape[1]) - x.shape[1]))
    return rounded.to(torch.float8_e4m3fn), amax / LARGEST


def _by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    return _quantize(x, x.nan_to_num(nan=0.0).abs().amax(1, keepdim=True))


def rows_in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix ``[R, D]`` in e4m3, ``[R, P]`` with P = :func:`padded_size` of D and zeros in the
    added columns, and the scale of each row, fp32 ``[R]``."""
    values, scales = _by_row(x)
    return values, scales[:, 0]


def _by_matrix(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    return _quantize(x, (x.abs().amax() if x.numel() else x.new_zeros(())).view(1, 1))


_QUANTIZE = {"row": _by_row, "matrix": _by_matrix}


def quantize_operands_cpu(hidden: Tensor, weight: Tensor, *, by: By = "row") -> Quantized:
    """What :func:`~sparton.kernels.segment_max.quantize.quantize_operands` returns, for matrices
    on the CPU."""
    (hidden8, scale), (weight8, weight_scale) = map(_QUANTIZE[by], (hidden, weight))
    if by == "row":
        return hidden8, weight8, (scale[:, 0], weight_scale[:, 0])
    return hidden8, weight8, (None, (scale * weight_scale)[0].repeat(weight.shape[0]))


def rounded(x: Tensor, *, by: By = "row") -> Tensor:
    """fp32 ``[R, D]``: a matrix as e4m3 and its scales hold it."""
    x8, scale = _QUANTIZE[by](x)
    return x8[:, : x.shape[1]].float() * scale
