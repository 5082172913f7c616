"""The quick interpreter gives what Triton's own does, and leaves its language as it was."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

if torch.cuda.is_available():
    pytest.skip("kernels are compiled", allow_module_level=True)

from tests import interpreter

ROWS, COLUMNS = 4, 8


@triton.jit
def _earlier_of_largest(x, i, y, j):
    stays = (x > y) | ((x == y) & (i < j))
    return tl.where(stays, x, y), tl.where(stays, i, j)


@triton.jit
def _kernel(
    x_ptr, largest_ptr, place_ptr, sum_ptr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    places = COLUMNS * tl.arange(0, ROWS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + places)
    largest, place = tl.reduce((x, places), AXIS, _earlier_of_largest)
    tl.store(largest_ptr + tl.arange(0, LEFT), largest)
    tl.store(place_ptr + tl.arange(0, LEFT), place)
    tl.store(sum_ptr + tl.arange(0, LEFT), tl.sum(x, AXIS))


def reduced(x: torch.Tensor, axis: int) -> list[np.ndarray]:
    left = x.shape[1 - axis]
    results = [torch.empty(left, dtype=dtype) for dtype in (x.dtype, torch.int32, x.dtype)]
    _kernel[(1,)](x, *results, ROWS, COLUMNS, axis, left)
    return [result.numpy() for result in results]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_reductions_are_those_of_numpy_and_of_triton(dtype, axis, monkeypatch):
    x = torch.randint(0, 4, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(2)).to(dtype)
    numbers = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    first = np.expand_dims(x.numpy().argmax(axis), axis)  # many are equal
    place = np.take_along_axis(numbers, first, axis).squeeze(axis)
    found = reduced(x, axis)
    expected = [x.numpy().max(axis), place, x.numpy().sum(axis)]
    assert all(map(np.array_equal, found, expected))
    assert not np.array_equal(found[1], reduced(x.flip(axis).contiguous(), axis)[1])
    own = interpreter._reduce_elements
    monkeypatch.setattr(interpreter.interpreter.ReduceOps, "generic_reduce", own)
    assert all(map(np.array_equal, reduced(x, axis), found))


def test_between_launches_the_language_is_tritons():
    before = tl.arange, tl.tensor.__add__
    reduced(torch.ones(ROWS, COLUMNS), 0)
    assert (tl.arange, tl.tensor.__add__) == before
