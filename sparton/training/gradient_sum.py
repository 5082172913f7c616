"""The sum of the gradients of all ranks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparton.sharded import is_sharded
from sparton.training.distributed import World

# Gradients with fewer elements are added up together.
SMALL = 2**16


class GradientSum:
    """Adds up the gradients of all ranks, in place, while the backward pass still makes others.

    Large gradients go one by one, each when it and those before it in a common order are complete:
    the order of the first backward pass of rank 0. Small ones go together at the end. A parameter
    without a gradient counts as zero.

    Args:
        world: of the ranks; all give parameters of the same shapes.
        parameters: whose gradients are added up, but for sharded ones: these are added up by what
            shards them.
    """

    def __init__(self, world: World, parameters: Iterable[nn.Parameter]) -> None:
        self._world = world
        self._parameters = [p for p in parameters if not is_sharded(p)]
        self._small = [p for p in self._parameters if p.numel() < SMALL]
        self._large = [n for n, p in enumerate(self._parameters) if p.numel() >= SMALL]
        self._order: list[int] | None = None
        self._complete: dict[int, None] | None = None  # numbers, in order; None: not watching
        self._pending: list[dist.Work] = []
        if world.size > 1:
            for number in self._large:
                hook = partial(self._arrive, number)
                self._parameters[number].register_post_accumulate_grad_hook(hook)

    @contextmanager
    def of_last_backward(self) -> Iterator[None]:
        """The backward pass within completes the gradients, which are sums when it ends."""
        if self._world.size == 1 or not self._parameters:
            yield
            return
        self._complete = {}
        try:
            yield
            self._finish(list(self._complete))
        finally:
            self._complete = None
            self._pending.clear()

    def _arrive(self, number: int, _: Tensor) -> None:
        if self._complete is not None:
            self._complete[number] = None
            if self._order is not None:
                while self._started < len(self._order) and self._next in self._complete:
                    self._start(self._next)

    @property
    def _started(self) -> int:
        return len(self._pending)

    @property
    def _next(self) -> int:
        assert self._order is not None
        return self._order[self._started]

    def _start(self, number: int) -> None:
        self._pending.append(_summed(_gradient(self._parameters[number])))

    def _finish(self, complete: list[int]) -> None:
        if self._order is None:
            self._order = self._agree(complete)
        while self._started < len(self._order):
            self._start(self._next)
        for dtype in dict.fromkeys(parameter.dtype for parameter in self._small):
            parts = [_gradient(parameter) for parameter in self._small if parameter.dtype == dtype]
            together = torch.cat([part.flatten() for part in parts])
            _summed(together).wait()
            sizes = [part.numel() for part in parts]
            views = zip(together.split(sizes), parts, strict=True)
            torch._foreach_copy_(parts, [view.view_as(part) for view, part in views])
        for work in self._pending:
            work.wait()

    def _agree(self, complete: list[int]) -> list[int]:
        """The numbers of large parameters, those without a gradient last, as rank 0 has them."""
        order = torch.tensor([*complete, *(n for n in self._large if n not in complete)])
        dist.broadcast(order, src=0)
        return order.tolist()


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _summed(gradient: Tensor) -> dist.Work:
    work = dist.all_reduce(gradient, async_op=True)
    assert work is not None
    return work
