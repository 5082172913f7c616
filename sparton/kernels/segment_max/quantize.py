"""Both operands rounded to FP8 (e4m3) on a GPU, with a scale for each row or one for each matrix.

T tokens, V rows of the weight, D hidden, P: D rounded up to a multiple of 16.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.e4m3 import e4m3_scale, scaled_to_e4m3
from sparton.kernels.launch import KEPT_PLANS, Step, cdiv, next_power_of_2, plan_step, run_steps
from sparton.kernels.segment_max.operands import num_rows
from sparton.kernels.segment_max.quantize_cpu import (
    SCALE_BOUNDS,
    By,
    Norms,
    Quantized,
    padded_size,
)

ELEMENTS = 4096  # of a program
# Programs that look for the largest value of a matrix: a power of 2.
PARTS = 512
# Of hidden and the weight, in this order, those whose rows share a scale.
MATRICES: dict[By, int] = {"row": 0, "weight_row": 1, "matrix": 2}


@triton.jit
def _largest(x):
    """The largest absolute value, NaN if there is one: its bits are above those of infinity."""
    bits = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)
    return tl.max(bits).to(tl.float32, bitcast=True)


@triton.jit
def _largest_of_part(
    x_ptr, size, PARTS: tl.constexpr, ELEMENTS: tl.constexpr, FINITE: tl.constexpr
):
    """The largest absolute value in every PARTS-th block of the elements, or of the FINITE ones."""
    amax = tl.zeros((ELEMENTS,), tl.float32)
    for first in range(tl.program_id(0).to(tl.int64) * ELEMENTS, size, PARTS * ELEMENTS):
        offs = first + tl.arange(0, ELEMENTS)
        x = tl.abs(tl.load(x_ptr + offs, offs < size, 0.0).to(tl.float32))
        if FINITE:
            x = tl.where(x < float("inf"), x, 0.0)
        amax = tl.maximum(amax, x, propagate_nan=tl.PropagateNan.ALL)
    return _largest(amax)


@triton.jit
def _largest_kernel(
    hidden_ptr, weight_ptr, amax_ptr, hidden_size, weight_size,
    PARTS: tl.constexpr, ELEMENTS: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """A row of programs for hidden, and one for the weight or none: ``amax`` is ``[2, PARTS]``."""
    matrix = tl.program_id(1)
    if matrix == 0:
        amax = _largest_of_part(hidden_ptr, hidden_size, PARTS, ELEMENTS, FINITE)
    else:
        amax = _largest_of_part(weight_ptr, weight_size, PARTS, ELEMENTS, FINITE)
    tl.store(amax_ptr + matrix * PARTS + tl.program_id(0), amax)


@triton.jit
def _bounded(amax, LOW: tl.constexpr, HIGH: tl.constexpr):
    amax = tl.maximum(amax, LOW, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(amax, HIGH, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quantize(
    x_ptr, rounded_ptr, scale_ptr, amax_ptr, norms_ptr, program, R, first_scale,
    P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows of a matrix, each by its own largest absolute value or all by the largest of
    PARTS values; and their norms. Scales are written times ``first_scale``. NaN stays NaN; an
    infinite element becomes the largest one."""
    rows = program.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_P)[None, :]
    places = rows[:, None] * P + columns
    inside = (rows < R)[:, None] & (columns < P)
    x = tl.load(x_ptr + places, inside, 0.0).to(tl.float32)
    if norms_ptr is not None:
        tl.store(norms_ptr + rows, tl.sqrt(tl.sum(x * x, 1)), rows < R)
    if amax_ptr is None:
        amax = tl.max(tl.abs(x), 1)
    else:
        amax = _largest(tl.load(amax_ptr + tl.arange(0, PARTS))) + tl.zeros((BLOCK_R,), tl.float32)
    amax = _bounded(amax, LOW, HIGH)
    x = scaled_to_e4m3(x, amax)
    tl.store(rounded_ptr + places, x.to(rounded_ptr.dtype.element_ty), inside)
    if scale_ptr is not None:
        tl.store(scale_ptr + rows, e4m3_scale(amax) * first_scale, rows < R)


@triton.jit(do_not_specialize=["T", "V", "of_hidden"])
def _quantize_kernel(
    hidden_ptr, weight_ptr, amax_ptr, hidden8_ptr, weight8_ptr, hidden_scale_ptr, weight_scale_ptr,
    hidden_norms_ptr, weight_norms_ptr, T, V, of_hidden, MATRICES: tl.constexpr,
    P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    PARTS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """The first ``of_hidden`` programs round hidden, the others the weight. The first MATRICES of
    the two have one scale each, the others one for each row. Where all tokens have one, it is not
    written: the scales of the weight are products of both."""
    program = tl.program_id(0)
    if program < of_hidden:
        amax_of_hidden = amax_ptr if MATRICES > 0 else None
        _quantize(
            hidden_ptr, hidden8_ptr, hidden_scale_ptr, amax_of_hidden, hidden_norms_ptr,
            program, T, 1.0, P, BLOCK_R, BLOCK_P, PARTS, LOW, HIGH,
        )  # fmt: skip
    else:
        scale = 1.0
        if MATRICES > 0:
            amax = _largest(tl.load(amax_ptr + tl.arange(0, PARTS)))
            scale = e4m3_scale(_bounded(amax, LOW, HIGH))
        amax_of_weight = amax_ptr + PARTS if MATRICES > 1 else None
        _quantize(
            weight_ptr, weight8_ptr, weight_scale_ptr, amax_of_weight, weight_norms_ptr,
            program - of_hidden, V, scale, P, BLOCK_R, BLOCK_P, PARTS, LOW, HIGH,
        )  # fmt: skip


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan(T: int, V: int, P: int, parts: int, matrices: int) -> tuple[Step, ...]:
    """``matrices``: how many of the two have one scale."""
    block_p = next_power_of_2(P)
    block_r = max(ELEMENTS // block_p, 1)
    programs = [cdiv(rows, block_r) for rows in (T, V)]
    steps = []
    if matrices:
        steps.append(
            plan_step(
                _largest_kernel, (parts, matrices), T * P, V * P,
                PARTS=parts, ELEMENTS=ELEMENTS, FINITE=matrices == 1,
            )
        )  # fmt: skip
    steps.append(
        plan_step(
            _quantize_kernel, (sum(programs),), T, V, programs[0], MATRICES=matrices,
            P=P, BLOCK_R=block_r, BLOCK_P=block_p, PARTS=parts,
            LOW=SCALE_BOUNDS[0], HIGH=SCALE_BOUNDS[1],
            num_warps=min(max(block_p // 1024, 4), 16),
        )
    )  # fmt: skip
    return tuple(steps)


def quantize_operands(
    hidden: Tensor, weight: Tensor, *, by: By = "row", norms: Norms = (None, None)
) -> Quantized:
    """Round both to e4m3. A scale is a largest absolute value / 448, found on the device.

    Args:
        hidden: ``[T, D]`` float16 or bfloat16 on a GPU of compute capability 8.9 or later; its rows
            may lie along several axes.
        weight: ``[V, D]`` in the same dtype; its rows, too, may lie along several axes.
        by: "row" gives each row a scale, "matrix" one to all tokens and one to all rows,
            "weight_row" one to all tokens, by the largest of their finite values, and one to each
            row of the weight.
        norms: fp32 ``[T]`` and ``[V]``, to be filled with the norms of the rows, or None.

    Returns:
        float8_e4m3fn ``[T, P]`` and ``[V, P]`` (tensor descriptors ask for rows of whole 16 bytes)
        with zeros in the added columns (NaN where the scale is), and the scales, fp32, as
        :func:`~sparton.kernels.segment_max.forward.segment_max_forward` takes them: ``[T]``, or
        None where they share one, which is a factor of the others then, and ``[V]``.
    """
    T, V, D = num_rows(hidden), num_rows(weight), hidden.shape[-1]
    P = padded_size(D)
    if P > D:
        # Not in the kernel: where columns are known to be zeros, ptxas crashes on their rounding or
        # gets it wrong.
        hidden, weight = (torch.nn.functional.pad(x, (0, P - D)) for x in (hidden, weight))
    hidden8, weight8 = (
        x.new_empty((rows, P), dtype=torch.float8_e4m3fn) for x, rows in ((hidden, T), (weight, V))
    )
    weight_scale = weight.new_empty(V, dtype=torch.float32)
    hidden_scale = hidden.new_empty(T, dtype=torch.float32) if by == "row" else None
    matrices = MATRICES[by]
    if T or V:
        tensors = {
            "hidden": hidden.contiguous(),
            "weight": weight.contiguous(),
            "amax": weight.new_empty((2, PARTS), dtype=torch.float32) if matrices else None,
            "hidden8": hidden8,
            "weight8": weight8,
            "hidden_scale": hidden_scale,
            "weight_scale": weight_scale,
            "hidden_norms": norms[0],
            "weight_norms": norms[1],
        }
        run_steps(_plan(T, V, P, PARTS, matrices), tensors)
    return hidden8, weight8, (hidden_scale, weight_scale)
