"""Tokens of unit length, and the way back of their gradients.

T tokens, E embedding.

cross.py multiplies tokens that were normalised before: it materialises them in the dtype of the
operands, for no longer than a call takes, instead of scaling every similarity. Its backward
computes them and the norms again, so that nothing is saved; projection.py saves both. streaming.py,
bound by reading, normalises on the fly. Norms and the Jacobian are computed in fp32.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import KEPT_PLANS, Launch, cdiv, next_power_of_2
from sparton.kernels.segment_max.operands import num_rows

EPSILON = tl.constexpr(1e-12)
ELEMENTS = 4096


@triton.jit
def _load(x_ptr, rows, mask, offs_e, E: tl.constexpr):
    ptrs = x_ptr + rows.to(tl.int64)[:, None] * E + offs_e[None, :]
    return tl.load(ptrs, mask[:, None] & (offs_e < E)[None, :], 0.0).to(tl.float32)


@triton.jit
def norms_of(x):
    """The norms of the rows."""
    return tl.sqrt_rn(tl.sum(x * x, 1))


@triton.jit
def divided_by(x, norms):
    """Rows over their norms, or over EPSILON where those are less."""
    return x / tl.maximum(norms, EPSILON)[:, None]


@triton.jit
def reached(grad):
    """The rows of a gradient that are not zero. Of others there is none behind the norm either,
    whatever they hold: masked tokens may be no numbers."""
    return tl.sum(tl.abs(grad), 1) != 0.0


@triton.jit(do_not_specialize=["T"])
def _normalize_kernel(
    x_ptr, rows_ptr, y_ptr, norms_ptr, T,
    E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    rows = t
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + t, t < T, 0)
    x = _load(x_ptr, rows, t < T, offs_e, E)
    norms = norms_of(x)
    if norms_ptr is not None:
        tl.store(norms_ptr + t, norms, t < T)
    y = divided_by(x, norms)
    ptrs = y_ptr + t.to(tl.int64)[:, None] * E + offs_e[None, :]
    tl.store(ptrs, y.to(y_ptr.dtype.element_ty), (t < T)[:, None] & (offs_e < E)[None, :])


@triton.jit(do_not_specialize=["T"])
def _normalize_backward_kernel(
    grad_ptr, x_ptr, dx_ptr, T, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    x = _load(x_ptr, t, t < T, offs_e, E)
    g = _load(grad_ptr, t, t < T, offs_e, E)
    norms = norms_of(x)
    unit = divided_by(x, norms)
    radial = tl.where(norms >= EPSILON, tl.sum(g * unit, 1), 0.0)
    dx = tl.where(reached(g)[:, None], divided_by(g - unit * radial[:, None], norms), 0.0)
    ptrs = dx_ptr + t.to(tl.int64)[:, None] * E + offs_e[None, :]
    tl.store(ptrs, dx.to(dx_ptr.dtype.element_ty), (t < T)[:, None] & (offs_e < E)[None, :])


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan(backward: bool, T: int, E: int) -> Launch:
    kernel = _normalize_backward_kernel if backward else _normalize_kernel
    block_e = next_power_of_2(E)
    block_t = max(ELEMENTS // block_e, 1)
    return Launch(kernel, (cdiv(T, block_t),), T, E=E, BLOCK_T=block_t, BLOCK_E=block_e)


def normalize_tokens(
    tokens: Tensor, rows: Tensor | None = None, norms: Tensor | None = None
) -> Tensor:
    """``x / max(|x|, 1e-12)`` of each row of ``tokens``, in their dtype.

    Args:
        tokens: ``[T, E]``, or these rows along several axes.
        rows: int32 ``[R]``, those that are wanted; the result is ``[R, E]`` then.
        norms: fp32, one for each row of the result, to be filled; or None.
    """
    tokens, E = tokens.contiguous(), tokens.shape[-1]
    unit = torch.empty_like(tokens) if rows is None else tokens.new_empty((rows.shape[0], E))
    if unit.numel():
        _plan(False, num_rows(unit), E)(tokens, rows, unit, norms)
    return unit


def normalize_tokens_backward(grad: Tensor, tokens: Tensor) -> Tensor:
    """Gradient ``[T, E]`` of ``tokens`` from that of the normalised ones; in the dtype of
    ``tokens``.

    ``(g - y <y, g>) / |x|`` with ``y = x / |x|``; below a length of 1e-12 ``g / 1e-12``; zero where
    ``g`` is zero, whatever ``x`` holds.
    """
    tokens, grad = tokens.contiguous(), grad.contiguous()
    (T, E), dtokens = tokens.shape, torch.empty_like(tokens)
    if T:
        _plan(True, T, E)(grad, tokens, dtokens)
    return dtokens
