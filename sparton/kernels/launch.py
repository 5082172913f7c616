"""Launches of Triton kernels, and sums for them, with little time of the host.

``kernel[grid](...)`` binds its arguments by name, works out what to specialise for and asks the
driver about every pointer, at every launch. Here only what code is specialised for is looked at:
dtype and alignment of tensors, divisibility and size of integers, all constants. What was compiled
is then run as Triton itself would run it, if it is a Triton that is known to do it so.
"""

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

# Plans, launches made of sizes, that each function keeps: more than the shapes of a training step.
# Packed batches never come again, and plans of large vocabularies have many launches.
KEPT_PLANS = 32

# Before a kernel's arguments, see runs_as_known.
RUN = [
    "gridX", "gridY", "gridZ", "stream", "function",
    "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook",
]  # fmt: skip

# What Triton compiled: by kernel, constants and kinds of integers; then by device and kinds of
# tensors.
_compiled: defaultdict[tuple, dict[tuple, tuple]] = defaultdict(dict)


class Launch:
    """A launch that lacks only its tensors: a kernel, a number of programs, sizes and constants.

    Who launches the same sizes again keeps it: a call looks at nothing but tensors then.
    """

    __slots__ = ("_codes", "_programs", "constants", "grid", "integers", "kernel")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], *integers: int, **constants: Any
    ) -> None:
        """
        Args:
            kernel: function under ``triton.jit`` or ``gluon.jit``; its arguments are tensors, then
                integers, then those that are constexpr.
            grid: number of programs along 1 to 3 axes.
            integers: the arguments between tensors and constants, in order.
            constants: the constexpr ones and options of compilation, hashable.
        """
        self.kernel, self.grid, self.integers = kernel, grid, integers
        self._programs = (*grid, 1, 1)[:3]
        # What Triton does unasked today: 3.9 warns that a later one will not.
        constants = {"enable_fp_fusion": True, **constants}
        self.constants = constants
        kinds = [1 if i == 1 else 2 + (i % 16 == 0) + 2 * (-(2**31) <= i < 2**31) for i in integers]
        self._codes = _compiled[id(kernel), *constants, *constants.values(), *kinds]

    def __call__(self, *tensors: Any) -> None:
        """``kernel[grid](*tensors, *integers, **constants)``, which Triton's interpreter and
        profilers (launch hooks) get.

        Args:
            tensors: the first arguments, in order: tensors, tensor descriptors, None.

        Raises:
            TypeError: tensors and integers are not all the arguments that are not constexpr.
        """
        kernel = self.kernel
        if not isinstance(kernel, JITFunction) or _is_watched():
            kernel[self.grid](*tensors, *self.integers, **self.constants)
            return
        active = driver.active
        device = active.get_current_device()
        key: list[Any] = [device]
        arguments: list[Any] = []
        layouts: list[Any] = []
        bits, on_gpu = 0, True
        for x in tensors:
            if x is None:
                key.append(None)
                arguments.append(None)
            elif isinstance(x, Tensor):
                pointer = x.data_ptr()
                key.append(x.dtype)
                arguments.append(pointer)
                bits |= pointer
                on_gpu &= x.is_cuda
            else:
                layout = getattr(x, "layout", None)
                key += (x.base.dtype, *x.block_shape, x.padding, id(layout))
                arguments.append(x)
                layouts.append(layout)
        if bits % 16:
            key += [isinstance(x, int) and x % 16 for x in arguments]
        # A tensor of the CPU is told apart too: Triton has a message for it.
        key.append(on_gpu)
        kept = tuple(key)
        found = self._codes.get(kept)
        if found is None:
            compiled = kernel[self.grid](*tensors, *self.integers, **self.constants)
            # Constants have a place among the arguments, but nobody reads it. Layouts are kept, or
            # others might get their ids.
            known = runs_as_known(kernel, compiled)
            operands = len(tensors) + len(self.integers)
            constants = (None,) * _num_constants(kernel, operands) if known else ()
            self._codes[kept] = (compiled if known else None, constants, layouts)
            return
        compiled, constants, _ = found
        if compiled is None:
            kernel[self.grid](*tensors, *self.integers, **self.constants)
            return
        compiled.run(
            *self._programs, active.get_current_stream(device),
            compiled.function, compiled.packed_metadata, None, None, None,
            *arguments, *self.integers, *constants,
        )  # fmt: skip


def _is_watched() -> bool:
    """Whether a profiler is told of launches."""
    return knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls


class Step(NamedTuple):
    """A launch, and what takes its tensors out of many that have names."""

    launch: Launch
    choose: Callable[[dict[str, Any]], tuple]


def plan_step(kernel: Any, grid: tuple[int, ...], *integers: int, **constants: Any) -> Step:
    """A :class:`Launch` of a kernel whose tensors, two or more, are the arguments ``NAME_ptr``.

    Raises:
        TypeError: fewer than two.
    """
    return Step(Launch(kernel, grid, *integers, **constants), _chooser(tuple(kernel.arg_names)))


@functools.cache
def _chooser(arguments: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple]:
    names = [name.removesuffix("_ptr") for name in arguments if name.endswith("_ptr")]
    if len(names) < 2:  # itemgetter gives a tuple for several.
        raise TypeError(f"a step takes two or more arguments NAME_ptr, got {list(arguments)}")
    return itemgetter(*names)


def run_steps(steps: Iterable[Step], tensors: dict[str, Any]) -> None:
    """Launch one after the other, ``NAME_ptr`` being ``tensors["NAME"]``."""
    for step in steps:
        step.launch(*step.choose(tensors))


def descriptor(x: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """The descriptor of a contiguous matrix that is read in blocks of this size.

    The rows may lie along several axes. (``TensorDescriptor.from_tensor`` asks for the strides, and
    the rows of a matrix that has but one may be said to lie anywhere.)
    """
    columns = x.shape[-1]
    shape = [x.shape[:-1].numel(), columns]
    return TensorDescriptor(x, shape, [columns, 1], [block_rows, block_columns])


def fits_descriptor(x: Tensor) -> bool:
    """Whether a contiguous tensor has rows of whole 16 bytes, as descriptors ask. (Its strides do
    not tell: an axis of one element may have any.)"""
    aligned = x.data_ptr() % 16 == 0 and x.shape[-1] * x.element_size() % 16 == 0
    return aligned and x.numel() > 0


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has. A CPU is given 2, so that the interpreter, too, runs what
    several of them share."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def l2_cache(device: torch.device) -> int:
    """Bytes of the L2 cache; of an H100, where there is no GPU."""
    if device.type != "cuda":
        return 50 * 2**20
    return torch.cuda.get_device_properties(device).L2_cache_size


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have at most: from 99 KiB (compute capability 8.6,
    8.9, 12.0) to 227 KiB (9.0, 10.0). The interpreter knows no limit."""
    if device.type != "cuda":
        return sys.maxsize
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def cdiv(size: int, part: int) -> int:
    """``size / part`` rounded up. (``triton.cdiv`` is also meant for kernels: to call it from the
    host takes as long as a launch, and so does ``triton.next_power_of_2``.)"""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The smallest power of 2, from 1 on, that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def runs_as_known(kernel: Any, compiled: Any) -> bool:
    """Whether the code of a kernel can be run without Triton's binding of arguments.

    The names that this takes are no public interface. ``run`` gets RUN before the arguments of the
    kernel; Triton 3.7 to 3.9 name all of that, 3.6 the first five. With any other Triton, every
    launch is Triton's own.
    """
    private = (kernel, "constexprs"), (compiled, "function"), (compiled, "packed_metadata")
    try:
        parameters = inspect.signature(compiled.run).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return False
    names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    others = [x.kind for x in parameters if x.kind is not x.POSITIONAL_OR_KEYWORD]
    known = names in (RUN, RUN[:5]) and others == [inspect.Parameter.VAR_POSITIONAL]
    return known and all(hasattr(owner, name) for owner, name in private)


def _num_constants(kernel: Any, num_operands: int) -> int:
    """How many arguments are constexpr. They must come last, and all others be operands."""
    if kernel.constexprs != list(range(num_operands, len(kernel.arg_names))):
        constants = [kernel.arg_names[i] for i in kernel.constexprs]
        raise TypeError(
            f"{kernel.fn.__name__} takes {kernel.arg_names}, constexpr are {constants}: these must "
            f"come last and be given by name, and all others in order, got {num_operands}"
        )
    return len(kernel.constexprs)
