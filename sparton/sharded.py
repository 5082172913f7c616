"""Tensors of which each rank has a part. Nothing here imports what makes them, which takes half a
second: who has some has imported it."""

import sys
from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank has a part of a tensor that is spread over the ranks."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; all ranks call it together where it is sharded."""
    held: Any = tensor
    return held.full_tensor() if is_sharded(tensor) else tensor
