"""The processes that train together: who we are, and the three collectives a step needs."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

# The others wait while rank 0 evaluates. A rank that dies does not keep them: torchrun ends all.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class World:
    """This process among the ``size`` processes that torchrun started (one of one without it)."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenate ``[n, ...]`` of every rank, in rank order, to ``[size * n, ...]``.

        Without a graph: the exact step differentiates with respect to its own rows only.
        """
        if self.size == 1:
            return rows
        gathered = rows.new_empty((self.size, *rows.shape))
        dist.all_gather(list(gathered.unbind()), rows.contiguous())
        return gathered.flatten(0, 1)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of all ranks, in place. A parameter without one counts as zero."""
        if self.size == 1:
            return
        pending = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            pending.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in pending:
            work.wait()

    def broadcast(self, module: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        if self.size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.data, src=0)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def leave_world() -> None:
    """End this process's part in the group. The group lives as long as the process: torchrun's
    rendezvous does not serve a second one, which the next cell of a sweep would ask for."""
    if dist.is_initialized():
        dist.destroy_process_group()


def join_world() -> World:
    """Join the process group that torchrun describes in the environment, or be alone.

    A GPU is used when there is one: NCCL then, gloo on CPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.cuda.device_count():
            raise ValueError(
                f"process {rank} wants GPU {device.index}, this machine has "
                f"{torch.cuda.device_count()}; start torchrun with a smaller --nproc_per_node"
            )
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_PATIENCE)
    return World(rank, size, device)
