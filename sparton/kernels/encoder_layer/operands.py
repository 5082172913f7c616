"""What the operands must look like. T tokens, D columns."""

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


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
