"""How calls reach the kernels, on any device; imports no Triton.

Kernels are imported when the first call arrives (:func:`late`). torch.compile, torch.export and
dispatch modes see registered operators. Where :func:`needs_operators` is False, calls run the same
functions from an autograd function, or directly where no gradient can follow.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Function = TypeVar("Function", bound=Callable[..., Any])
Late = Callable[[], Callable[..., Any]]


def on_its_device(launch: Function) -> Function:
    """Run with the device of the first argument, a tensor or a tuple that starts with one, as the
    current one: Triton launches there. Where it is that already, nothing is set. (A tuple whose
    first tensor is on the meta device, as of an operand in FP8 alone, has others behind it.)"""

    @functools.wraps(launch)
    def guarded(first: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = first if isinstance(first, Tensor) else first[0]
        if tensor.is_meta and isinstance(first, tuple) and isinstance(first[1], tuple):
            tensor = first[1][0]
        if is_elsewhere(tensor):
            with torch.cuda.device_of(tensor):
                return launch(first, *args, **kwargs)
        return launch(first, *args, **kwargs)

    return cast(Function, guarded)


def late(path: str) -> Late:
    """What gives the function at a dotted path, of a module that is imported at the first call:
    Triton is there where tensors are on a GPU, and need not be elsewhere."""
    module, _, name = path.rpartition(".")
    return functools.cache(lambda: getattr(import_module(module), name))


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU that is not the current one."""
    return tensor.is_cuda and tensor.get_device() != torch.cuda.current_device()


def needs_operators() -> bool:
    """Whether kernels must run inside registered operators, as torch.compile, torch.export and
    dispatch modes (fake tensors, FLOP counters) see nothing else. In eager mode the dispatcher of
    operators that are written in Python only costs time."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives to matrix products with ``x``; None where it is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Switches torch.autocast off, where it is on."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    if torch.compiler.is_compiling():  # which knows no other way
        return torch.autocast(device.type, enabled=False)
    return _AutocastOff(device.type)


class _AutocastOff:
    """Autocast's own context takes the host as long as a launch."""

    __slots__ = ("_device",)

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._device, True)


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All in the dtype of torch.autocast, where that is on."""
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple(x.to(dtype) for x in tensors)


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU of compute capability 9.0, which some kernels are written for."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)
