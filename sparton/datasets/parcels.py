"""Batches on their way between processes: every tensor of one in a single block of memory.

A tensor costs a file handle, a handshake with the process that made it, and an allocation of pinned
memory. A parcel costs that once, whatever is in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparton.types import TrainBatch

_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor whose content is in the block."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


class Parcel:
    """A batch whose tensors lie in one block of bytes."""

    def __init__(self, batch: TrainBatch) -> None:
        pieces: list[Tensor] = []
        size = 0

        def put(leaf: Any) -> Any:
            nonlocal size
            if not isinstance(leaf, Tensor):
                return leaf
            piece = leaf.flatten().view(torch.uint8)
            place = _Place(size, leaf.dtype, leaf.shape)
            padding = -piece.numel() % _ALIGNMENT
            pieces.extend([piece, piece.new_empty(padding)])
            size += piece.numel() + padding
            return place

        self._batch = _replace(batch, put)
        self._block = torch.cat(pieces)

    def pin_memory(self) -> "Parcel":
        self._block = self._block.pin_memory()
        return self

    def batch(self) -> TrainBatch:
        """The batch again; its tensors are views of the block."""

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, _Place):
                return leaf
            stop = leaf.start + leaf.shape.numel() * leaf.dtype.itemsize
            return self._block[leaf.start : stop].view(leaf.dtype).view(leaf.shape)

        return _replace(self._batch, take)


def pack(batch: Any) -> Parcel:
    """A parcel of a batch, as a loader asks for it."""
    return Parcel(batch)


def _replace(part: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree of named tuples with every leaf changed."""
    if isinstance(part, tuple):
        return type(part)(*(_replace(each, change) for each in part))
    return change(part)
