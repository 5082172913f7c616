"""Hidden states projected to embeddings of unit length, and their gradients' way back.

T tokens, H hidden, E embedding.

A program owns a tile of tokens and holds all their units: the product and the normalisation, and
on the way back the Jacobian of the normalisation and the product, need no memory between them.
Norms and the Jacobian are computed in fp32, the latter from tokens in the dtype of the operands.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import KEPT_PLANS, Launch, cdiv, next_power_of_2
from sparton.kernels.maxsim.normalization import EPSILON, divided_by, norms_of

BLOCK_T, BLOCK_H = 64, 64  # tokens of a program, hidden units of a step
# Wider tiles do not fit into the shared memory of smaller GPUs, nor those of fp32 into registers.
MOST_UNITS = 128


@triton.jit
def project(
    hidden_ptr, projection_ptr, rows, H: tl.constexpr, E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Embeddings of BLOCK_T rows of hidden states, fp32 ``[BLOCK_T, BLOCK_E]``."""
    offs_e = tl.arange(0, BLOCK_E)
    embedding = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for first in range(0, H, BLOCK_H):
        offs_h = first + tl.arange(0, BLOCK_H)
        inside = offs_h < H
        h = tl.load(hidden_ptr + rows[:, None] * H + offs_h[None, :], inside[None, :], 0.0)
        ptrs = projection_ptr + offs_e[:, None] * H + offs_h[None, :]
        w = tl.load(ptrs, (offs_e < E)[:, None] & inside[None, :], 0.0)
        embedding = tl.dot(h, w.T, embedding, input_precision="ieee")
    return embedding


@triton.jit(do_not_specialize=["T"])
def _project_kernel(
    hidden_ptr, projection_ptr, unit_ptr, norms_ptr, T,
    H: tl.constexpr, E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    t = first + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    rows = tl.minimum(tl.arange(0, BLOCK_T), T - 1 - first)
    x = project(hidden_ptr + first * H, projection_ptr, rows, H, E, BLOCK_T, BLOCK_E, BLOCK_H)
    norms = norms_of(x)
    unit = divided_by(x, norms).to(unit_ptr.dtype.element_ty)
    inside = (t < T)[:, None] & (offs_e < E)[None, :]
    tl.store(unit_ptr + t[:, None] * E + offs_e[None, :], unit, inside)
    tl.store(norms_ptr + t, norms, t < T)


@triton.jit(do_not_specialize=["T"])
def _project_backward_kernel(
    grad_ptr, unit_ptr, norms_ptr, projection_ptr, dhidden_ptr, T,
    H: tl.constexpr, E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Gradients of the projected tokens take the place of those of the unit ones."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    places = t[:, None] * E + offs_e[None, :]
    inside = (t < T)[:, None] & (offs_e < E)[None, :]
    unit = tl.load(unit_ptr + places, inside, 0.0).to(tl.float32)
    norms = tl.load(norms_ptr + t, t < T, 1.0)
    grad = tl.load(grad_ptr + places, inside, 0.0).to(tl.float32)
    # Rounding moved the token off the unit sphere: nothing of a radial gradient may be left over.
    radial = tl.sum(grad * unit, 1) / tl.sum(unit * unit, 1)
    radial = tl.where(norms >= EPSILON, radial, 0.0)
    through = divided_by(grad - unit * radial[:, None], norms).to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + places, through, inside)
    if dhidden_ptr is not None:
        for first in range(0, H, BLOCK_H):
            offs_h = first + tl.arange(0, BLOCK_H)
            ptrs = projection_ptr + offs_e[:, None] * H + offs_h[None, :]
            w = tl.load(ptrs, (offs_e < E)[:, None] & (offs_h < H)[None, :], 0.0)
            dhidden = tl.dot(through, w, input_precision="ieee")
            ptrs = dhidden_ptr + t[:, None] * H + offs_h[None, :]
            mask = (t < T)[:, None] & (offs_h < H)[None, :]
            tl.store(ptrs, dhidden.to(dhidden_ptr.dtype.element_ty), mask)


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan(backward: bool, T: int, H: int, E: int) -> Launch:
    return Launch(
        _project_backward_kernel if backward else _project_kernel,
        (cdiv(T, BLOCK_T),), T, H=H, E=E, BLOCK_T=BLOCK_T, BLOCK_H=BLOCK_H,
        BLOCK_E=max(next_power_of_2(E), 16), num_warps=4, num_stages=3,
    )  # fmt: skip


def project_to_unit(hidden: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """``p / max(|p|, 1e-12)`` with ``p = projection @ hidden_t``, and ``|p|``.

    Args:
        hidden: contiguous ``[T, H]``, meant for 16 bits.
        projection: contiguous ``[E, H]``, the same dtype; meant for E up to MOST_UNITS.

    Returns:
        ``[T, E]`` in that dtype, and fp32 ``[T]``.
    """
    (T, H), E = hidden.shape, projection.shape[0]
    unit, norms = hidden.new_empty((T, E)), hidden.new_empty(T, dtype=torch.float32)
    if T:
        _plan(False, T, H, E)(hidden, projection, unit, norms)
    return unit, norms


def project_to_unit_backward(
    grad: Tensor, unit: Tensor, norms: Tensor, projection: Tensor, *, need_hidden: bool
) -> Tensor | None:
    """Gradient of the hidden states; that of the projected tokens is written over ``grad``.

    ``(g - y <y, g>) / |p|`` with ``y = p / |p|``; below a length of 1e-12 ``g / 1e-12``.

    Args:
        grad: contiguous ``[T, E]``: gradient of the unit tokens, overwritten.
        unit, norms: of :func:`project_to_unit`.
        projection: contiguous ``[E, H]``.
        need_hidden: whether the result is wanted.

    Returns:
        ``[T, H]`` in the dtype of the operands, or None.
    """
    (T, E), H = grad.shape, projection.shape[1]
    dhidden = grad.new_empty((T, H)) if need_hidden else None
    if T:
        _plan(True, T, H, E)(grad, unit, norms, projection, dhidden)
    return dhidden
