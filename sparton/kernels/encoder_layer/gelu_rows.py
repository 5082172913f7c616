"""The kernels of gelu.py with whole rows in a program, which round them to FP8 as well.

T rows, D columns, in tiles as in fp8_rows.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.encoder_layer.fp8_operands import Fp8Rows
from sparton.kernels.encoder_layer.fp8_rows import (
    ROWS,
    SMALLEST,
    STAGES,
    WARPS,
    largest_of_rows,
    store_column_sums,
    store_rows_of_tiles,
    whole_rows,
    zero_tiles,
)
from sparton.kernels.encoder_layer.gelu import approximates, gelu, gelu_slope
from sparton.kernels.encoder_layer.tiles import load_rows, programs_over_rows, store_rows
from sparton.kernels.launch import Launch, cdiv

BACKWARD_PROGRAMS = 8  # for each multiprocessor


@triton.jit(do_not_specialize=["T"])
def _gelu_rows_kernel(
    x_ptr, bias_ptr, out_ptr, values_ptr, scales_ptr, T,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    largest = tl.full((ROWS,), SMALLEST, tl.float32)
    tiles = ()
    for tile in tl.static_range(TILES):
        d = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = (t < T)[:, None] & (d < D)[None, :]
        bias = tl.load(bias_ptr + d, d < D, 0.0).to(tl.float32)
        u = load_rows(x_ptr, t, d, inside, D) + bias[None, :]
        # FP8 is made of what the gradient of the next weight reads.
        out = gelu(u, APPROXIMATE).to(x_ptr.dtype.element_ty).to(tl.float32)
        if out_ptr is not None:
            store_rows(out_ptr, t, d, inside, out, D)
        found = largest_of_rows(out, inside)
        largest = tl.maximum(largest, found, propagate_nan=tl.PropagateNan.ALL)
        tiles += (out,)  # type: ignore[assignment]
    store_rows_of_tiles(values_ptr, scales_ptr, t, tiles, largest, T, D, COLUMNS, TILES)


@triton.jit(do_not_specialize=["T", "programs"])
def _gelu_rows_backward_kernel(
    grad_ptr, x_ptr, bias_ptr, dx_ptr, values_ptr, scales_ptr, sum_ptr, T, programs,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
    APPROXIMATE: tl.constexpr,
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
            bias = tl.load(bias_ptr + d, d < D, 0.0).to(tl.float32)
            u = load_rows(x_ptr, t, d, inside, D) + bias[None, :]
            dx = load_rows(grad_ptr, t, d, inside, D) * gelu_slope(u, APPROXIMATE)
            sums += (totals[tile] + dx,)  # type: ignore[assignment]
            dx = dx.to(dx_ptr.dtype.element_ty).to(tl.float32)
            store_rows(dx_ptr, t, d, inside, dx, D)
            found = largest_of_rows(dx, inside)
            largest = tl.maximum(largest, found, propagate_nan=tl.PropagateNan.ALL)
            tiles += (dx,)  # type: ignore[assignment]
        totals = sums
        store_rows_of_tiles(values_ptr, scales_ptr, t, tiles, largest, T, D, COLUMNS, TILES)
    store_column_sums(sum_ptr, totals, program, D, COLUMNS, TILES)


def gelu_rows_forward(x: Tensor, bias: Tensor, rows: Fp8Rows, *, save: bool = True) -> Tensor:
    """As ``gelu_forward``; ``rows [T, D]`` are filled with the result in FP8, and nothing else
    unless ``save``: what is returned is then on the meta device."""
    T, D = x.shape
    out = torch.empty_like(x, device=None if save else "meta")
    if x.numel():
        Launch(
            _gelu_rows_kernel, (cdiv(T, ROWS),), T,
            APPROXIMATE=approximates(x), num_warps=WARPS, **whole_rows(D),
        )(x, bias, out if save else None, *rows)  # fmt: skip
    return out


def gelu_rows_backward(
    grad: Tensor, x: Tensor, bias: Tensor, rows: Fp8Rows
) -> tuple[Tensor, Tensor]:
    """As ``gelu_backward``; ``rows [T, D]`` are filled with the gradient of x in FP8."""
    T, D = x.shape
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, bias.new_zeros(D, dtype=torch.float32)
    programs = programs_over_rows(x, ROWS, BACKWARD_PROGRAMS)
    sums = torch.empty((programs, D), dtype=torch.float32, device=x.device)
    Launch(
        _gelu_rows_backward_kernel, (programs,), T, programs,
        APPROXIMATE=approximates(x), num_warps=WARPS, **whole_rows(D),
    )(grad, x, bias, dx, *rows, sums)  # fmt: skip
    return dx, sums.sum(0)
