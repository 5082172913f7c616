"""Matrices in FP8 (e4m3) with a scale for each row. T rows, D columns; imports no Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

SIXTEEN = 16  # bytes that rows must be whole multiples of: what tensor cores read at once


class Fp8Rows(NamedTuple):
    """A matrix of which a row is its values times its scale.

    Attributes:
        values: float8_e4m3fn ``[T, D]``, contiguous.
        scales: fp32 ``[T]``, the largest absolute value of each row / 448.
    """

    values: Tensor
    scales: Tensor

    def restored(self) -> Tensor:
        """fp32 ``[T, D]``."""
        return self.values.float() * self.scales[:, None]


class Fp8Operand(NamedTuple):
    """What a product in FP8 reads, and what the gradient of its weight reads.

    Attributes:
        wide: ``[..., D]`` in 16 bits; it alone has a gradient.
        rows: the same numbers in FP8, as ``[T, D]``.
    """

    wide: Tensor
    rows: Fp8Rows


def empty_rows(T: int, D: int, device: torch.device) -> Fp8Rows:
    """To be filled."""
    return Fp8Rows(
        torch.empty((T, D), dtype=torch.float8_e4m3fn, device=device),
        torch.empty(T, dtype=torch.float32, device=device),
    )
