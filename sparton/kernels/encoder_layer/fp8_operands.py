"""Matrices in FP8 (e4m3) with a scale for each row. T rows, D columns; imports no Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

FP8_MULTIPLE = 16  # of which the columns of a matrix are whole multiples: tensor cores ask for it


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
        wide: ``[..., D]`` in 16 bits; it alone has a gradient. Where nothing is recorded for
            gradients it may be on the meta device, with a shape and a dtype and no memory.
        rows: the same numbers in FP8, as ``[T, D]``.
    """

    wide: Tensor
    rows: Fp8Rows


def empty_rows(x: Tensor) -> Fp8Rows:
    """To be filled with ``x [T, D]``."""
    return Fp8Rows(
        torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(x.shape[0], dtype=torch.float32, device=x.device),
    )
