"""Matrices in FP8 (e4m3) with a scale for each row. T rows, D columns; imports no Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

FP8_MULTIPLE = 16  # of which the columns of a matrix are whole multiples: tensor cores ask for it


class Fp8Rows(NamedTuple):
    """A matrix of which a row is its values times its scale.

    Attributes:
        values: float8_e4m3fn ``[T, D]``, contiguous.
        scales: fp32 ``[T]``, powers of two.
    """

    values: Tensor
    scales: Tensor

    def restored(self) -> Tensor:
        """fp32 ``[T, D]``."""
        return self.values.float() * self.scales[:, None]


class Limits(NamedTuple):
    """What no number of a row is larger than, but for roundings: ``norms * factor + offset``.

    Attributes:
        norms: fp32 ``[T]``, of the rows of a matrix; or of what a product was made of, whose
            numbers are no larger than the norm of their row times the largest one of its weight.
            None: all rows have the largest one's limit.
        largest: fp32 ``[]``, of the norms.
        factor, offset: fp32 ``[]``; None: 1 and 0.
    """

    norms: Tensor | None
    largest: Tensor
    factor: Tensor | None = None
    offset: Tensor | None = None


class Fp8Operand(NamedTuple):
    """What a product in FP8 reads, and what the gradient of its weight reads.

    Attributes:
        wide: ``[..., D]`` in 16 bits; it alone has a gradient. What is read in FP8 alone has a
            shape and a dtype there, and a number of its memory.
        rows: the same numbers in FP8, as ``[T, D]``.
        turned: the same as ``[D, T]``, one scale for all, with zeros behind T up to a multiple of
            :data:`FP8_MULTIPLE`; None where no weight has a gradient.
        limits: of its numbers.
    """

    wide: Tensor
    rows: Fp8Rows
    turned: Fp8Rows | None
    limits: Limits


def unknown_limits(x: Tensor) -> Limits:
    """The limits of ``x [T, D]``, yet to be filled in."""
    norms, largest = (
        torch.empty(shape, dtype=torch.float32, device=x.device) for shape in ((len(x),), ())
    )
    return Limits(norms, largest)
