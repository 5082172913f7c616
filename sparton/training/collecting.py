"""Objects on their way from all ranks to the first one. What is large about them, the memory of
their tensors, travels as it is: a pickle would copy it several times on either side."""

import io
import pickle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def collect(own: Any, rank: int, size: int) -> list[Any] | None:
    """What every rank has, in rank order, on rank 0; None on the others. Tensors are the CPU's.

    Rank 0 keeps its own object, and takes those of the others one rank after the other.
    """
    if rank:
        _send(own)
        return None
    return [own, *map(_receive, range(1, size))]


def _send(own: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(own)
    parts = [torch.frombuffer(each, dtype=torch.uint8) for each in (file.getbuffer(), *buffers)]
    dist.send(torch.tensor(len(parts)), 0)
    dist.send(torch.tensor([part.numel() for part in parts]), 0)
    _wait([dist.isend(part, 0) for part in parts])


def _receive(rank: int) -> Any:
    number = torch.tensor(0)
    dist.recv(number, rank)
    sizes = torch.zeros(int(number), dtype=torch.int64)
    dist.recv(sizes, rank)
    parts: list[Any] = [np.empty(each, np.uint8) for each in sizes.tolist()]
    _wait([dist.irecv(torch.from_numpy(part), rank) for part in parts])
    return pickle.loads(parts[0], buffers=parts[1:])


def _wait(messages: list[Any]) -> None:
    """Wait for messages that were all begun before: after each wait this thread may have to wait
    again, for those that encode to let it run."""
    for message in messages:
        message.wait()


class _Pickler(pickle.Pickler):
    """Leaves the memory of tensors out, for the callback that takes buffers."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.numel():
            return NotImplemented
        packed = value.detach().contiguous()
        # Of a single number the stride may be any.
        flat = packed.as_strided((packed.numel(),), (1,))
        memory: Any = flat.view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(memory), value.dtype, value.shape)


def _tensor(memory: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype).view(shape)
