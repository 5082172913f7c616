"""Matrices rounded to FP8 (e4m3), in PyTorch."""

from typing import Literal

import torch
from torch import Tensor

LARGEST = 448.0
# Of a largest absolute value: the scale, its inverse and scaled sums stay finite and normal.
SCALE_BOUNDS = (2.0**-100, 2.0**100)

# What has a scale: each row; each row of the weight and all tokens together; each matrix.
By = Literal["row", "weight_row", "matrix"]
Norms = tuple[Tensor | None, Tensor | None]
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


def _by_matrix(x: Tensor, *, finite: bool = False) -> tuple[Tensor, Tensor]:
    """``finite``: by the largest of the finite values."""
    x = x.float()
    seen = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if finite else x
    amax = seen.abs().amax() if x.numel() else x.new_zeros(())
    return _quantize(x, amax.view(1, 1))


def quantize_operands_cpu(
    hidden: Tensor, weight: Tensor, *, by: By = "row", norms: Norms = (None, None)
) -> Quantized:
    """What :func:`~sparton.kernels.segment_max.quantize.quantize_operands` returns, for matrices
    on the CPU."""
    for of_rows, x in zip(norms, (hidden, weight), strict=True):
        if of_rows is not None:
            of_rows.copy_(torch.linalg.vector_norm(x, dim=1, dtype=torch.float32))
    weight8, weight_scale = (_by_matrix if by == "matrix" else _by_row)(weight)
    if by == "row":
        hidden8, scale = _by_row(hidden)
        return hidden8, weight8, (scale[:, 0], weight_scale[:, 0])
    hidden8, scale = _by_matrix(hidden, finite=by == "weight_row")
    return hidden8, weight8, (None, (scale * weight_scale)[:, 0].expand(weight.shape[0]).clone())


def rounded(x: Tensor, *, by: By = "row") -> Tensor:
    """fp32 ``[R, D]``: a matrix as e4m3 and its scales hold it, by "row" or by "matrix"."""
    x8, scale = _by_row(x) if by == "row" else _by_matrix(x)
    return x8[:, : x.shape[1]].float() * scale
