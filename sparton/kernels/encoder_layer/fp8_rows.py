"""Rows rounded to FP8 (e4m3) in kernels that have whole rows, and in a kernel that does no more.

T rows, D columns. A scale is the largest absolute value of its row / 448. A row with a number that
is not finite has none that is finite in a product: NaN stays NaN, and infinity becomes NaN.

A row of more than COLUMNS columns lies in several tiles, so that 3,072 columns are three tiles of
1,024, and no lane waits for the next power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.e4m3 import e4m3_scale, scaled_to_e4m3
from sparton.kernels.encoder_layer.fp8_operands import Fp8Rows
from sparton.kernels.encoder_layer.tiles import load_rows, programs_over_rows, store_rows
from sparton.kernels.launch import Launch, cdiv, next_power_of_2

COLUMNS = 1024
ROWS, WARPS = 1, 4
PROGRAMS = 12  # for each multiprocessor, where columns are added up
# Rows are copied while others before them are rounded, which takes as long as their memory does.
STAGES = tl.constexpr(3)
# The least largest value: a scale and its inverse stay normal numbers.
SMALLEST = tl.constexpr(2.0**-100)


def whole_rows(D: int) -> dict[str, int]:
    """Constants of kernels whose programs have whole rows in tiles."""
    columns = min(next_power_of_2(D), COLUMNS)
    return {"D": D, "ROWS": ROWS, "COLUMNS": columns, "TILES": cdiv(D, columns)}


@triton.jit
def largest_of_rows(x, inside):
    """The largest absolute value of each row of ``x [R, C]``, and SMALLEST at least."""
    largest = tl.max(tl.where(inside, tl.abs(x), 0.0), 1)
    return tl.maximum(largest, SMALLEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_values(ptr, rows, columns, inside, x, largest, D: tl.constexpr):
    # Columns outside are not made zero before: ptxas crashes on the rounding of constants.
    store_rows(ptr, rows, columns, inside, scaled_to_e4m3(x, largest), D)


@triton.jit
def store_scales(ptr, rows, largest, T):
    tl.store(ptr + rows, e4m3_scale(largest), rows < T)


@triton.jit
def store_rows_of_tiles(
    values_ptr, scales_ptr, rows, tiles, largest, T,
    D: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Whole rows, in tiles, once the largest of each is known."""
    for tile in tl.static_range(TILES):
        d = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = (rows < T)[:, None] & (d < D)[None, :]
        store_values(values_ptr, rows, d, inside, tiles[tile], largest, D)
    store_scales(scales_ptr, rows, largest, T)


@triton.jit
def zero_tiles(ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """As many fp32 ``[ROWS, COLUMNS]`` as a row has tiles."""
    tiles = ()
    for _ in tl.static_range(TILES):
        tiles += (tl.zeros((ROWS, COLUMNS), tl.float32),)  # type: ignore[assignment]
    return tiles


@triton.jit
def store_column_sums(
    ptr, tiles, program, D: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr
):
    for tile in tl.static_range(TILES):
        d = tile * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(ptr + program.to(tl.int64) * D + d, tl.sum(tiles[tile], 0), d < D)


@triton.jit(do_not_specialize=["T", "programs"])
def _fp8_rows_kernel(
    x_ptr, values_ptr, scales_ptr, sum_ptr, T, programs,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th group of rows; their sum goes to ``sum [programs, D]``."""
    program = tl.program_id(0)
    totals = zero_tiles(ROWS, COLUMNS, TILES)
    for lo in tl.range(program * ROWS, T, programs * ROWS, num_stages=STAGES):
        t = lo + tl.arange(0, ROWS)
        largest = tl.full((ROWS,), SMALLEST, tl.float32)
        tiles, sums = (), ()
        for tile in tl.static_range(TILES):
            d = tile * COLUMNS + tl.arange(0, COLUMNS)
            inside = (t < T)[:, None] & (d < D)[None, :]
            x = load_rows(x_ptr, t, d, inside, D)
            found = largest_of_rows(x, inside)
            largest = tl.maximum(largest, found, propagate_nan=tl.PropagateNan.ALL)
            tiles += (x,)  # type: ignore[assignment]
            sums += (totals[tile] + x,)  # type: ignore[assignment]
        totals = sums
        store_rows_of_tiles(values_ptr, scales_ptr, t, tiles, largest, T, D, COLUMNS, TILES)
    if sum_ptr is not None:
        store_column_sums(sum_ptr, totals, program, D, COLUMNS, TILES)


def round_rows(x: Tensor, rows: Fp8Rows) -> None:
    """Round ``x [T, D]``, contiguous, to ``rows``."""
    if x.numel():
        _round(x, rows, None, _programs(x))


def round_and_add_rows(x: Tensor, rows: Fp8Rows) -> Tensor:
    """As :func:`round_rows`, and the sum of each column of x, fp32 ``[D]``; the same bits every
    time."""
    if not x.numel():
        return x.new_zeros(x.shape[1]).float()
    sums = x.new_empty((_programs(x), x.shape[1]), dtype=torch.float32)
    _round(x, rows, sums, len(sums))
    return sums.sum(0)


def _programs(x: Tensor) -> int:
    return programs_over_rows(x, ROWS, PROGRAMS)


def _round(x: Tensor, rows: Fp8Rows, sums: Tensor | None, programs: int) -> None:
    T, D = x.shape
    launch = Launch(_fp8_rows_kernel, (programs,), T, programs, num_warps=WARPS, **whole_rows(D))
    launch(x, *rows, sums)
