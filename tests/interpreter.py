"""Triton's interpreter, which takes most of the time of tests without a GPU, made quick.

Of Triton 3.7 to 3.9; in 3.7 a call of ``tl.sum`` takes 0.7 ms. Results stay the same, bit for bit,
but for those of :func:`rounding`, for tests of what is rounded.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from inspect import getmembers
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_numpy_dtype = interpreter._get_np_dtype
_reduce_elements = interpreter.ReduceOps.generic_reduce
_convert = interpreter._convert_float
_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}
_ARANGE = [(module, module.arange) for module in (tl, tl.core)]
_dtypes: dict[str, np.dtype] = {}


def quicken() -> None:
    """Have it look up once what does not change, and compute nothing that is thrown away."""
    interpreter._patch_lang = _replace
    interpreter._patch_builtin = _replace_builtins
    interpreter._get_np_dtype = _known_dtype
    interpreter.ReduceOps.generic_reduce = _reduce_slices
    builder = interpreter.interpreter_builder
    # Its checks for overflows of integers compute each sum twice, for assertions that it ignores.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    builder.create_splat = _splat


def _replace(function: Any) -> Any:
    """Put the interpreter's functions in the place of those of ``triton.language``: at each launch,
    not again at each call of a device function within, of which ``tl.sum`` is one."""
    if any(module.arange is builtin for module, builtin in _ARANGE):
        return _patch_lang(function)
    return interpreter._LangPatchScope()


@cache
def _builtins(namespace: Any) -> list[tuple[str, Any]]:
    return getmembers(namespace, tl.core.is_builtin)


def _replace_builtins(namespace: Any, builder: Any, scope: Any) -> None:
    for name, builtin in _builtins(namespace):
        if getattr(namespace, name) is builtin:  # and not replaced already
            interpreter._patch_attr(namespace, name, builtin, builder, scope)


def _splat(block: Any, scalar: Any) -> Any:
    """A block of one number. To the interpreter a comparison of two integers is an integer, too,
    which Triton 3.9 does not take for a mask."""
    data = np.full(block.shape, scalar.data.flat[0], interpreter._get_np_dtype(block))
    return interpreter.TensorHandle(data, block.scalar)


def _known_dtype(dtype: Any) -> np.dtype:
    element = dtype.scalar
    if element.name not in _dtypes:
        _dtypes[element.name] = _numpy_dtype(element)
    return _dtypes[element.name]


def _reduce_slices(self: Any, inputs: tuple) -> list:
    """A reduction of whole slices in their order, but where the function has branches."""
    branches = self.combine_fn.fn.__name__.startswith(("_argmax", "_argmin"))
    if self.axis is None or branches:
        return _reduce_elements(self, inputs)
    arrays = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    found: Any = None
    for slices in zip(*arrays, strict=True):
        tensors = [self.to_tensor(data, x.dtype) for data, x in zip(slices, inputs, strict=True)]
        found = tensors if found is None else self.combine_fn.fn(*found, *tensors)
        found = found if isinstance(found, list | tuple) else [found]
    shape = arrays[0].shape[1:]
    results = [x.handle.data.reshape(shape) for x in found]
    if self.keep_dims:
        results = [np.expand_dims(data, self.axis) for data in results]
    return [self.to_tensor(data, x.dtype) for data, x in zip(results, inputs, strict=True)]


@contextmanager
def rounding() -> Iterator[None]:
    """Inside, fp32 is rounded to the nearest number of fewer bits, and NaN stays NaN, as on a GPU.
    The interpreter itself cuts off, and in FP8 it loses NaN and carries."""
    interpreter._convert_float = _rounded
    try:
        yield
    finally:
        interpreter._convert_float = _convert


def _rounded(x: np.ndarray, dtype: Any, narrow: Any, mode: Any) -> np.ndarray:
    if dtype.name != "fp32" or narrow.name not in _NARROW:
        return _convert(x, dtype, narrow, mode)
    found = torch.from_numpy(np.array(x, np.float32)).to(_NARROW[narrow.name])
    bits = torch.uint8 if found.element_size() == 1 else torch.int16
    return found.view(bits).numpy()
