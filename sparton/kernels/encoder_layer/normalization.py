"""``LayerNorm(residual + dropout(x + bias))`` as one pass, and the way back as another.

T rows, D columns. The sum is kept for the backward, with mean and inverse deviation of each row;
the mask of the dropout is computed again. Column sums (the gradients of gain, bias and shift) are
taken while the rows are there: each program adds up its rows, and what they found is summed at the
end, in a fixed order.

Where layers begin with their norm, the sum is a result as well, and there is neither bias nor
shift. RMSNorm (Zhang and Sennrich, arXiv 1910.07467) leaves the mean where it is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.encoder_layer.dropout import MULTIPLIERS, threshold
from sparton.kernels.encoder_layer.fp8_limits import raise_largest, store_norms
from sparton.kernels.encoder_layer.fp8_operands import Limits
from sparton.kernels.encoder_layer.operands import Normalised
from sparton.kernels.encoder_layer.tiles import load_rows, programs_over_rows, store_rows
from sparton.kernels.launch import Launch, cdiv, next_power_of_2

# A row for a warp: sums over it need no barrier. Measured on an H200, 74,496 rows of 768 columns.
ROWS, WARP_COLUMNS = 1, 1024
BACKWARD_PROGRAMS = 8  # for each multiprocessor
# Rows are copied while others before them are computed. Those of fp32 keep memory busy without it.
STAGES = 3
_FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)
Tables = tuple[Tensor | None, Tensor | None]
_TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _is_kept(rows, columns, seed, D: tl.constexpr, THRESHOLD: tl.constexpr):
    """What :func:`hashed_dropout` keeps of ``[T, D]``, at rows ``[R]`` and columns ``[C]``."""
    x = rows.to(tl.uint32)[:, None] * D + columns.to(tl.uint32)[None, :]
    x = (x ^ (x >> 16)) * _FIRST
    x = x ^ (x >> 15) ^ seed.to(tl.uint32)
    x = x * _SECOND
    x = x ^ (x >> 16)
    return (x & 0x7FFFFFFF) >= THRESHOLD


@triton.jit
def _load_vector(ptr, d, D: tl.constexpr):
    return tl.load(ptr + d, d < D, 0.0).to(tl.float32)[None, :]


@triton.jit
def _rows(rows_ptr, t, T):
    """Which rows of an operand are those of ``t``: the same, or those it is told."""
    rows = t
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + t, t < T, 0)
    return rows


@triton.jit(do_not_specialize=["T"])
def _norm_kernel(
    x_ptr, x_rows_ptr, bias_ptr, residual_ptr, residual_rows_ptr, gain_ptr, shift_ptr, seed_ptr,
    out_ptr, copy_ptr, norms_ptr, sum_ptr, moments_ptr, T,
    CENTRED: tl.constexpr, SUM_DTYPE: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
    THRESHOLD: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (t < T)[:, None] & (d < D)[None, :]
    x = load_rows(x_ptr, _rows(x_rows_ptr, t, T), d, inside, D)
    if bias_ptr is not None:
        x += _load_vector(bias_ptr, d, D)
    if seed_ptr is not None:
        x = tl.where(_is_kept(t, d, tl.load(seed_ptr), D, THRESHOLD), x * SCALE, 0.0)
    total = x
    if residual_ptr is not None:
        total += load_rows(residual_ptr, _rows(residual_rows_ptr, t, T), d, inside, D)
        # What the backward will read is what is normalised.
        total = tl.where(inside, total.to(SUM_DTYPE).to(tl.float32), 0.0)
    deviation = total
    if CENTRED:
        mean = tl.sum(total, 1) / D
        deviation = tl.where(inside, total - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(deviation * deviation, 1) / D + EPS)
    out = deviation * inverse[:, None] * _load_vector(gain_ptr, d, D)
    if shift_ptr is not None:
        out += _load_vector(shift_ptr, d, D)
    store_rows(out_ptr, t, d, inside, out, D)
    if copy_ptr is not None:
        store_rows(copy_ptr, t, d, inside, out, D)
    if norms_ptr is not None:
        squares = tl.sum(tl.where(inside, out * out, 0.0), 1)
        store_norms(norms_ptr, t, squares, T)
    if sum_ptr is not None:
        store_rows(sum_ptr, t, d, inside, total, D)
    if moments_ptr is not None:
        tl.store(moments_ptr + t, inverse, t < T)
        if CENTRED:
            tl.store(moments_ptr + T + t, mean, t < T)


@triton.jit(do_not_specialize=["T", "programs"])
def _norm_backward_kernel(
    grad_ptr, copy_grad_ptr, sum_grad_ptr, sum_ptr, moments_ptr, gain_ptr, seed_ptr, dx_ptr,
    norms_ptr, largest_ptr, dresidual_ptr, columns_ptr, T, programs,
    CENTRED: tl.constexpr, VECTORS: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th tile of rows; column sums go to ``columns [VECTORS, programs, D]``: of
    the gradients of the gain and, if there are 3, of bias and shift."""
    program = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    gain = _load_vector(gain_ptr, d, D)
    dgain = tl.zeros((ROWS, BLOCK_D), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK_D), tl.float32)
    dshift = tl.zeros((ROWS, BLOCK_D), tl.float32)
    largest = tl.zeros((ROWS,), tl.float32)
    for lo in tl.range(program * ROWS, T, programs * ROWS, num_stages=STAGES):
        t = lo + tl.arange(0, ROWS)
        inside = (t < T)[:, None] & (d < D)[None, :]
        grad = load_rows(grad_ptr, t, d, inside, D)
        if copy_grad_ptr is not None:
            grad += load_rows(copy_grad_ptr, t, d, inside, D)
        total = load_rows(sum_ptr, t, d, inside, D)
        inverse = tl.load(moments_ptr + t, t < T, 0.0)
        if CENTRED:
            mean = tl.load(moments_ptr + T + t, t < T, 0.0)
            total = tl.where(inside, total - mean[:, None], 0.0)
        unit = total * inverse[:, None]
        dunit = grad * gain
        along = tl.sum(dunit * unit, 1) / D
        if CENTRED:
            level = tl.sum(dunit, 1) / D
            dunit -= level[:, None]
        dtotal = (dunit - unit * along[:, None]) * inverse[:, None]
        if sum_grad_ptr is not None:
            dtotal += load_rows(sum_grad_ptr, t, d, inside, D)
        if dresidual_ptr is not None:
            store_rows(dresidual_ptr, t, d, inside, dtotal, D)
        dx = dtotal
        if seed_ptr is not None:
            dx = tl.where(_is_kept(t, d, tl.load(seed_ptr), D, THRESHOLD), dtotal * SCALE, 0.0)
        store_rows(dx_ptr, t, d, inside, dx, D)
        if norms_ptr is not None:
            squares = tl.sum(tl.where(inside, dx * dx, 0.0), 1)
            norms = store_norms(norms_ptr, t, squares, T)
            largest = tl.maximum(largest, norms, propagate_nan=tl.PropagateNan.ALL)
        dgain += grad * unit
        if VECTORS == 3:
            dbias += dx
            dshift += grad
    if norms_ptr is not None:
        raise_largest(largest_ptr, largest)
    columns_ptr += program.to(tl.int64) * D
    part = programs.to(tl.int64) * D
    tl.store(columns_ptr + d, tl.sum(dgain, 0), d < D)
    if VECTORS == 3:
        tl.store(columns_ptr + part + d, tl.sum(dbias, 0), d < D)
        tl.store(columns_ptr + 2 * part + d, tl.sum(dshift, 0), d < D)


def _tile(D: int) -> dict[str, int]:
    block = next_power_of_2(D)
    return {"D": D, "ROWS": ROWS, "BLOCK_D": block, "num_warps": cdiv(block, WARP_COLUMNS)}


def _dropout(p: float, seed: Tensor | None) -> dict[str, float]:
    """Constants of the kernels; without a seed nothing is dropped."""
    if seed is None:
        return {"SCALE": 1.0, "THRESHOLD": 0}
    return {"SCALE": 1.0 / (1.0 - p), "THRESHOLD": threshold(p)}


def norm_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, gain: Tensor, shift: Tensor | None,
    seed: Tensor | None, *, p: float, eps: float, dtype: torch.dtype, copy: torch.dtype | None,
    save: bool, limits: Limits | None = None, centred: bool = True, tables: Tables = (None, None),
) -> Normalised:  # fmt: skip
    """``[T, D]`` in ``dtype``, the same in ``copy``, and what the backward reads if ``save``.

    Args:
        x, residual: ``[T, D]``, contiguous. Without a residual, x and its bias are what is
            normalised, without dropout; where the backward is wanted, there is no bias either.
        bias, gain, shift: ``[D]``, contiguous; None adds nothing.
        seed: int32 ``[]`` of the dropout with probability ``p``; None drops nothing.
        eps: of the normalisation.
        limits: unknown ones, filled with those of the rows of the result.
        centred: LayerNorm, else RMSNorm.
        tables: int64 ``[T]``, contiguous, for an x or a residual ``[any, D]`` that is a table: its
            row for each row of the result. There is no backward then.
    """
    T, D = len(x if tables[0] is None else tables[0]), x.shape[1]
    out = torch.empty((T, D), dtype=dtype, device=x.device)
    second = None if copy is None else torch.empty((T, D), dtype=copy, device=x.device)
    sum_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    sums = moments = None
    if save and residual is not None:
        sums = torch.empty((T, D), dtype=sum_dtype, device=x.device)
    if save:
        moments = torch.empty((1 + centred, T), dtype=torch.float32, device=x.device)
    norms, largest = (None, None) if limits is None else limits[:2]
    if T:
        Launch(
            _norm_kernel, (cdiv(T, ROWS),), T, CENTRED=centred,
            SUM_DTYPE=_TRITON_DTYPES[sum_dtype], EPS=eps, **_dropout(p, seed), **_tile(D),
        )(
            x, tables[0], bias, residual, tables[1], gain, shift, seed, out, second,
            norms, sums, moments,
        )  # fmt: skip
        if norms is not None:
            # Not by the kernel, whose programs have a row each: they would stand in line for it.
            torch.amax(norms, 0, out=largest)
    return Normalised(out, second, x if save and sums is None else sums, moments)


def norm_backward(
    grad: Tensor, copy_grad: Tensor | None, sum_grad: Tensor | None, sums: Tensor, moments: Tensor,
    gain: Tensor, seed: Tensor | None, *, vectors: int, p: float,
    dtypes: tuple[torch.dtype, torch.dtype | None], limits: Limits | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of x and of the residual ``[T, D]`` in these dtypes, and fp32 ``[vectors, D]``: of
    the gain and, if there are 3, of bias and shift. The same bits every time.

    Args:
        grad, copy_grad: ``[T, D]``, contiguous, upstream gradients of the result and of its copy;
            their sum counts.
        sum_grad: of what is normalised, where that is a result too.
        sums, moments, gain, seed, p: of the forward.
        dtypes: of the gradients of x and of the residual; None: there is none.
        limits: unknown ones, filled with those of the rows of the gradient of x.
    """
    T, D = grad.shape
    dx = torch.empty((T, D), dtype=dtypes[0], device=grad.device)
    dresidual = None if dtypes[1] is None else torch.empty_like(dx, dtype=dtypes[1])
    norms, largest = (None, None) if limits is None else limits[:2]
    if largest is not None:
        largest.zero_()
    if not T:
        return dx, dresidual, torch.zeros((vectors, D), dtype=torch.float32, device=grad.device)
    programs = programs_over_rows(grad, ROWS, BACKWARD_PROGRAMS)
    columns = torch.empty((vectors, programs, D), dtype=torch.float32, device=grad.device)
    constants = {"CENTRED": len(moments) == 2, "VECTORS": vectors, **_dropout(p, seed)}
    stages = 1 if sums.dtype == torch.float32 else STAGES
    tile = {"STAGES": stages, **_tile(D)}
    Launch(_norm_backward_kernel, (programs,), T, programs, **constants, **tile)(
        grad, copy_grad, sum_grad, sums, moments, gain, seed, dx, norms, largest, dresidual,
        columns,
    )  # fmt: skip
    return dx, dresidual, columns.sum(1)
