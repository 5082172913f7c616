"""The processes that train together: who we are, and the three collectives a step needs."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparton.representations import Representations, TokenVectors
from sparton.sparse_vectors import OwnVectors, SparseVectors, bounds_of

# The others wait while rank 0 evaluates. A rank that dies does not keep them: who started it ends
# all.
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

    def gather(self, reps: Representations) -> Representations:
        """The representations of every rank, in rank order. The own ones keep their graph, the
        others' are constants: the gradient that comes back is that of this rank's texts alone.

        All ranks have as many texts; they may differ in their numbers of tokens and of active
        entries. Of sparse vectors without zeros only active entries travel, 8 bytes each: fewer
        bytes than all entries where less than half of these are active.
        """
        if self.size == 1:
            return reps
        sparse = reps.sparse
        if isinstance(sparse, SparseVectors):
            sparse = self._gather_vectors(sparse)
        elif sparse is not None:
            sparse = self.gather_rows(sparse)
        losses = {name: self.gather_rows(loss) for name, loss in reps.losses.items()}
        tokens = None if reps.tokens is None else self._gather_tokens(reps.tokens)
        return Representations(sparse, tokens, losses)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Concatenate ``[n, ...]`` of every rank to ``[size * n, ...]``; gradients as above."""
        if self.size == 1:
            return rows
        return cast(Tensor, _Gather.apply(rows, self, [rows.shape[0]] * self.size))

    def _gather_tokens(self, tokens: TokenVectors) -> TokenVectors:
        sizes = self._gather_size(tokens.values.shape[0])
        lengths = self.gather_rows(tokens.cu_seqlens.diff())
        mask = tokens.mask
        if mask is not None:
            mask = cast(Tensor, _Gather.apply(mask.byte(), self, sizes)).bool()
        values = cast(Tensor, _Gather.apply(tokens.values, self, sizes))
        return TokenVectors(values, F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), mask)

    def _gather_vectors(self, vectors: SparseVectors) -> SparseVectors:
        sizes = self._gather_size(vectors.num_entries)
        lengths = self.gather_rows(vectors.bounds.diff())
        terms = cast(Tensor, _Gather.apply(vectors.terms, self, sizes))
        values = cast(Tensor, _Gather.apply(vectors.values.detach(), self, sizes))
        own = OwnVectors(vectors, self.rank * vectors.num_vectors)
        return SparseVectors(values, terms, bounds_of(lengths), vectors.width, own)

    def _gather_size(self, own: int) -> list[int]:
        """A number of every rank."""
        number = torch.tensor([own])
        numbers = number.new_empty(self.size)
        # On the CPU, where the numbers are known: no rank waits for its GPU here.
        dist.all_gather(list(numbers.split(1)), number)
        return numbers.tolist()

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


class _Gather(torch.autograd.Function):
    """The rows of every rank, ``counts`` of them; backward keeps the own ones' gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World, counts: list[int]) -> Tensor:
        ctx.own = sum(counts[: world.rank]), counts[world.rank]
        most = max(counts)
        gathered = rows.new_empty((world.size, most, *rows.shape[1:]))
        padding = (0, 0) * (rows.ndim - 1) + (0, most - rows.shape[0])
        dist.all_gather(list(gathered.unbind()), F.pad(rows, padding).contiguous())
        if min(counts) == most:
            return gathered.flatten(0, 1)
        return torch.cat([each[:count] for each, count in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # A copy: a view would keep the gradient of all ranks.
        return gradients[0].narrow(0, *ctx.own).clone(), None, None


def leave_world() -> None:
    """End this process's part in the group, if there is one."""
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
                f"{torch.cuda.device_count()}: set gpus, or torchrun's --nproc_per_node, to that"
            )
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_PATIENCE)
    return World(rank, size, device)
