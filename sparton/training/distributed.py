"""The processes that train together: who we are, and the collectives that a step needs."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.sparse_vectors import OwnVectors, SparseVectors
from sparton.representations import Extent, Representations, TokenVectors
from sparton.sharded import is_sharded
from sparton.training.collecting import collect

# The others wait while rank 0 evaluates. A rank that dies does not keep them: who started it ends
# all.
_PATIENCE = timedelta(hours=2)
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the ``size`` processes that torchrun started (one of one without it), all
    on one machine or not."""

    rank: int
    size: int
    device: torch.device
    one_machine: bool = True

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(
        self, sides: Sequence[Representations], *, uneven: bool = False
    ) -> list[Representations]:
        """The representations of every rank, in rank order. The own ones keep their graph, the
        others' are constants: the gradient that comes back is that of this rank's texts alone.

        All ranks hold theirs alike, and as many of each side unless they are ``uneven``, on which
        all agree; they may differ in their numbers of tokens and of active entries. Of sparse
        vectors without zeros only active entries travel, 8 bytes each: fewer bytes than all entries
        where less than half of these are active.
        """
        if self.size == 1:
            return list(sides)
        if uneven or any(side.varies for side in sides):
            extents = self._gather_extents([side.extent for side in sides])
        else:
            extents = [(side.extent,) * self.size for side in sides]
        return [self._gather(*each) for each in zip(sides, extents, strict=True)]

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Concatenate ``[n, ...]`` of every rank to ``[size * n, ...]``; gradients as above."""
        return self._concatenate(rows, [rows.shape[0]] * self.size)

    def any(self, flags: Tensor) -> Tensor:
        """Bool flags of any shape, set where some rank has set them."""
        if self.size == 1:
            return flags
        total = flags.byte()  # NCCL knows no "or"
        dist.all_reduce(total, dist.ReduceOp.MAX)
        return total.bool()

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        of_all = torch.tensor(number)
        dist.all_reduce(of_all, dist.ReduceOp.MAX)  # on the CPU
        return int(of_all)

    def _gather(self, reps: Representations, extents: Sequence[Extent]) -> Representations:
        """``extents``: of every rank."""
        sparse, texts = reps.sparse, [extent.texts for extent in extents]
        if isinstance(sparse, SparseVectors):
            sparse = self._gather_vectors(sparse, extents)
        elif sparse is not None:
            sparse = self._concatenate(sparse, texts)
        one_each = [each._replace(tokens=each.texts, max_seqlen=1) for each in extents]
        tokens, dense = (
            half and self._gather_tokens(half, sizes)
            for half, sizes in ((reps.tokens, extents), (reps.dense, one_each))
        )
        losses = {name: self._concatenate(loss, texts) for name, loss in reps.losses.items()}
        return Representations(sparse, tokens, dense, losses)

    def _gather_tokens(self, tokens: TokenVectors, extents: Sequence[Extent]) -> TokenVectors:
        sizes = [extent.tokens for extent in extents]
        lengths = self._concatenate(tokens.cu_seqlens.diff(), [each.texts for each in extents])
        mask = tokens.mask
        if mask is not None:
            mask = self._concatenate(mask.byte(), sizes).bool()
        values = self._concatenate(tokens.values, sizes)
        cu_seqlens = cu_seqlens_of(lengths, torch.int32)
        longest = [extent.max_seqlen for extent in extents]
        return TokenVectors(values, cu_seqlens, mask, max(longest) if all(longest) else None)

    def _gather_vectors(self, vectors: SparseVectors, extents: Sequence[Extent]) -> SparseVectors:
        texts, sizes = ([getattr(each, name) for each in extents] for name in ("texts", "entries"))
        lengths = self._concatenate(vectors.lengths, texts)
        terms = self._concatenate(vectors.terms, sizes)
        values = self._concatenate(vectors.values.detach(), sizes)
        own = OwnVectors(vectors, sum(texts[: self.rank]))
        return SparseVectors(values, terms, cu_seqlens_of(lengths), vectors.width, own)

    def _gather_extents(self, own: Sequence[Extent]) -> list[tuple[Extent, ...]]:
        """For each part of this rank, the extents of that part on every rank."""
        numbers = torch.tensor(own)
        of_all = numbers.new_empty((self.size, *numbers.shape))
        # On the CPU, where the numbers are known: no rank waits for its GPU here.
        dist.all_gather(list(of_all.unbind()), numbers)
        ranks = [[Extent(*sizes) for sizes in rank] for rank in of_all.tolist()]
        return list(zip(*ranks, strict=True))

    def _concatenate(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of every rank, one rank after the other; rank r has ``counts[r]`` of them."""
        return rows if self.size == 1 else cast(Tensor, _Gather.apply(rows, self, counts))

    def collect(self, own: Any) -> list[Any] | None:
        """What every rank has, in rank order, on rank 0; None on the others. It travels on the
        host."""
        return collect(own, self.rank, self.size)

    def share(self, value: T) -> T:
        """What rank 0 has."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held)  # on the CPU
        return held[0]

    def broadcast(self, module: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0, but for sharded ones."""
        if self.size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                if not is_sharded(tensor):
                    dist.broadcast(tensor.data, src=0)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def each(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` comes to on every rank, in rank order.

        Raises:
            Exception: of this rank's work.
            OSError: that of another rank failed, in its words.
        """
        try:
            own: tuple[T | None, Exception | None] = work(), None
        except Exception as error:
            own = None, error
        told = own[0], own[1] and str(own[1])
        found: list[Any] = [told]
        if self.size > 1:
            found = [None] * self.size
            dist.all_gather_object(found, told)
        if own[1] is not None:
            raise own[1]
        if errors := [error for _, error in found if error is not None]:
            raise OSError(errors[0])
        return [value for value, _ in found]


class _Gather(torch.autograd.Function):
    """The rows of every rank, ``counts`` of them; backward keeps the own ones' gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World, counts: Sequence[int]) -> Tensor:
        ctx.own = sum(counts[: world.rank]), counts[world.rank]
        most = max(counts)
        gathered = rows.new_empty((world.size, most, *rows.shape[1:]))
        if missing := most - rows.shape[0]:
            rows = F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing))
        dist.all_gather(list(gathered.unbind()), rows.contiguous())
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
    one_machine = size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.cuda.device_count():
            raise ValueError(
                f"process {rank} wants GPU {device.index}, this machine has "
                f"{torch.cuda.device_count()}: start as many processes"
            )
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_PATIENCE)
    return World(rank, size, device, one_machine)
