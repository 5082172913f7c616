"""What the operands must look like. T tokens, D columns."""

from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Normalised(NamedTuple):
    """Results of a normalisation, and what its backward reads.

    Attributes:
        out: the result, ``[..., D]``.
        second: its copy in another dtype, None if not wanted.
        sums: ``[T, D]``, residual and dropout's result added, in the wider dtype of both; None if
            no backward follows.
        moments: fp32 ``[2, T]``, inverse standard deviation and mean of each row, or ``[1, T]``,
            the inverse root of its mean square; None as sums.
    """

    out: Tensor
    second: Tensor | None
    sums: Tensor | None
    moments: Tensor | None


class NormOptions(NamedTuple):
    """What :func:`~sparton.kernels.encoder_layer.post_norm_and_copy` takes by name; ``limits`` says
    whether those of the result's rows are wanted, by which it is rounded to FP8."""

    eps: float
    p: float
    dtype: torch.dtype
    copy: torch.dtype | None
    limits: bool = False


def rows_of(x: Tensor) -> Tensor:
    """``[..., D]`` as contiguous ``[T, D]``."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def check_operands(x: Tensor, *vectors: Tensor) -> None:
    """Raise ValueError unless ``vectors [D]`` fit to ``x [..., D]``."""
    if x.dtype not in FLOATS or x.dim() < 1:
        raise ValueError(
            f"x must be [..., D] in float16, bfloat16 or float32, got {x.dtype} {tuple(x.shape)}"
        )
    for vector in vectors:
        if vector.shape != x.shape[-1:] or vector.dtype not in FLOATS:
            raise ValueError(
                f"bias, gain and shift must be float tensors [D] = [{x.shape[-1]}], got "
                f"{vector.dtype} {tuple(vector.shape)}"
            )
        if vector.device != x.device:
            raise ValueError(f"operands must be on one device, got {x.device} and {vector.device}")


def check_residual(x: Tensor, residual: Tensor) -> None:
    """Raise ValueError unless it can be added to ``x``."""
    place = (x.shape, x.device)
    if (residual.shape, residual.device) != place or residual.dtype not in FLOATS:
        raise ValueError(
            f"residual must be a float tensor {tuple(x.shape)} on {x.device} like x, got "
            f"{residual.dtype} {tuple(residual.shape)} on {residual.device}"
        )
