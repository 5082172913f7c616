"""Studies of kernels that have a floor: the time of their least traffic or their least arithmetic
at the card's ceilings, whichever is longer."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from benchmarks.screen import Columns, Record, figure, timed_columns
from benchmarks.study import Measured, Settings, Study

FORWARD = "forward"  # the mode without a graph, as an encoder runs


class KernelCell(NamedTuple):
    """One provider of a kernel, at one shape."""

    shape: str
    mode: str
    provider: str

    @property
    def label(self) -> str:
        return " ".join(self)


def floor_ms(record: Record) -> str:
    """Milliseconds that a record's cell takes at least."""
    if "flop_floor_ms" not in record:
        return ""
    return f"{max(record['memory_floor_ms'], record['flop_floor_ms']):.4f}"


class KernelStudy(Study[KernelCell]):
    """Cells of one shape share a process, its problem and the truth of that.

    Attributes:
        shapes: by name; each has ``shrunk()``, small enough for a test on a CPU.
    """

    shapes: ClassVar[Mapping[str, Any]]
    cell = KernelCell
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "terabytes": {"type": float, "default": 4.3, "help": "per second; an H200's copy"},
        "tflop": {"type": float, "default": 790.0, "help": "per second, in 16 bits; its GEMM"},
    }
    columns: ClassVar[Columns] = timed_columns(
        **{"device ms": figure("device_ms", ".4f"), "floor ms": floor_ms}
    )

    @abstractmethod
    def problem(self, shape: Any, gradients: bool, device: str) -> tuple[Any, Any]:
        """What the cells of one shape have in common, and its truth, for some of them with
        gradients."""

    @abstractmethod
    def measure(self, cell: KernelCell, problem: Any, truth: Any, settings: Settings) -> Measured:
        """The record of one cell, its results judged before its time is taken."""

    def context(self, suite: str, settings: Settings) -> Record:
        terabytes, tflop = (settings.options[name] for name in self.options)
        return {"ceilings": {"terabytes_per_s": terabytes, "tflop_per_s": tflop}}

    def process_of(self, cell: KernelCell) -> Hashable:
        return cell.shape

    def prepare(
        self, cells: Sequence[KernelCell], settings: Settings
    ) -> Callable[[KernelCell], Measured]:
        shape, gradients = self.shapes[cells[0].shape], any(cell.mode != FORWARD for cell in cells)
        shape = shape.shrunk() if settings.miniature else shape
        operands = cache(lambda: self.problem(shape, gradients, settings.device))
        return lambda cell: self.measure(cell, *operands(), settings)


def run(
    kernel: Callable[..., Tensor], leaves: Sequence[Tensor], upstream: Tensor, mode: str
) -> tuple[Tensor, ...]:
    """The output without a graph, or with the gradients of all leaves."""
    if mode == FORWARD:
        with torch.no_grad():
            return (kernel(*leaves),)
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = kernel(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))


def floors(size: int, flop: int, settings: Settings, faster: float = 1.0) -> Record:
    """Milliseconds for the traffic and for the arithmetic.

    Args:
        size, flop: bytes and FLOPs that no algorithm does without.
        faster: how many times the rate in 16 bits the arithmetic has.
    """
    memory = size / settings.options["terabytes"] / 1e9
    products = flop / (faster * settings.options["tflop"]) / 1e9
    times = {"memory_floor_ms": round(memory, 5), "flop_floor_ms": round(products, 5)}
    return {"bytes": size, "flop": flop, **times}
