"""Launches of Triton kernels, and sums for them, with little time of the host.

``kernel[grid](...)`` binds its arguments by name, works out what to specialise for and asks the
driver about every pointer, at every launch. Here only what code is specialised for is looked at:
dtype and alignment of tensors, divisibility and size of integers, all constants.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

_compiled: dict[tuple, CompiledKernel] = {}


def launch(kernel: Any, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
    """``kernel[grid](*operands, **constants)``.

    Triton's interpreter and profilers (launch hooks) get just that.

    Args:
        kernel: function under ``triton.jit`` or ``gluon.jit``.
        grid: number of programs along 1 to 3 axes.
        operands: the arguments that are not constexpr, in order and before those that are: tensors,
            tensor descriptors, integers, None.
        constants: the constexpr ones and options of compilation, hashable.

    Raises:
        TypeError: as many operands as the kernel has arguments that are not constexpr are needed.
    """
    if not isinstance(kernel, JITFunction) or knobs.runtime.launch_enter_hook.calls:
        kernel[grid](*operands, **constants)
        return
    active = driver.active
    device = active.get_current_device()
    key: list[Any] = [id(kernel), device, *constants.values()]
    arguments: list[Any] = []
    for operand in operands:
        argument = operand
        if operand is None:
            key.append(None)
        elif isinstance(operand, int):
            kind = (operand % 16 == 0, -(2**31) <= operand < 2**31)
            key.append(1 if operand == 1 else kind)
        elif isinstance(operand, Tensor):
            argument = operand.data_ptr()
            # A tensor of the CPU is told apart too: Triton has a message for it.
            key.append((operand.dtype, argument % 16 == 0, operand.is_cuda))
        else:
            layout = getattr(operand, "layout", None)
            key.append((operand.base.dtype, *operand.block_shape, operand.padding, layout))
        arguments.append(argument)
    kept = tuple(key)
    compiled = _compiled.get(kept)
    if compiled is None:
        _check(kernel, len(operands))
        _compiled[kept] = kernel[grid](*operands, **constants)
        return
    # Constants have a place among the arguments, but nobody reads it.
    arguments += [None] * (len(kernel.arg_names) - len(arguments))
    compiled.run(
        *(*grid, 1, 1)[:3], active.get_current_stream(device),
        compiled.function, compiled.packed_metadata, None, None, None, *arguments,
    )  # fmt: skip


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 2 of a CPU, where the interpreter runs what would be shared."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def cdiv(size: int, part: int) -> int:
    """``size / part`` rounded up. (``triton.cdiv`` is also meant for kernels: to call it from the
    host takes as long as a launch, and so does ``triton.next_power_of_2``.)"""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The smallest power of 2, from 1 on, that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def _check(kernel: JITFunction, num_operands: int) -> None:
    """Whether arguments that are not constexpr come first, and are all among the operands."""
    if kernel.constexprs != list(range(num_operands, len(kernel.arg_names))):
        constants = [kernel.arg_names[i] for i in kernel.constexprs]
        raise TypeError(
            f"{kernel.fn.__name__} takes {kernel.arg_names}, constexpr are {constants}: these must "
            f"come last and be given by name, and all others in order, got {num_operands}"
        )
