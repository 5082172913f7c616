"""Hidden states projected to embeddings, and their gradients' way back.

T tokens, H hidden, E embedding.

Narrow embeddings of unit length in 16 bits go back in one kernel: a program owns a tile of tokens
and holds all their units, so that the Jacobian of the normalisation and the product need no memory
between them. Other products are PyTorch's. Norms and the Jacobian are computed in fp32, the latter
from tokens in the dtype of the operands.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import KEPT_PLANS, Launch, cdiv, next_power_of_2
from sparton.kernels.maxsim.normalization import EPSILON, divided_by, normalize_tokens, reached
from sparton.kernels.maxsim.operands import taking_part
from sparton.kernels.segment_max.operands import num_rows

BLOCK_T, BLOCK_H = 64, 64  # tokens of a program, hidden units of a step
# Wider tiles do not fit into the shared memory of smaller GPUs, nor those of fp32 into registers.
MOST_UNITS = 128


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
    through = divided_by(grad - unit * radial[:, None], norms)
    through = tl.where(reached(grad)[:, None], through, 0.0).to(grad_ptr.dtype.element_ty)
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
def _plan_backward(T: int, H: int, E: int) -> Launch:
    block_e = max(next_power_of_2(E), 16)
    # Embeddings too wide for the products come in tiles of as many elements.
    block_t = max(min(BLOCK_T, BLOCK_T * MOST_UNITS // block_e), 1)
    return Launch(
        _project_backward_kernel, (cdiv(T, block_t),), T,
        H=H, E=E, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_H=BLOCK_H, num_warps=4, num_stages=3,
    )  # fmt: skip


def project_tokens(
    hidden: Tensor, projection: Tensor, bias: Tensor | None, *, normalize: bool
) -> tuple[Tensor, Tensor]:
    """``projection @ hidden_t + bias`` of each token, over its norm or 1e-12 if ``normalize``;
    rounded to the dtype of the operands before that, too.

    Args:
        hidden: ``[T, H]``, or these rows along several axes.
        projection: ``[E, H]``, the same dtype.
        bias: ``[E]``, the same dtype, or None.

    Returns:
        ``[T, E]``, along the axes of hidden, in that dtype, and the norms, fp32 ``[T]``; those are
        empty without ``normalize``.
    """
    tokens = F.linear(hidden, projection, bias)
    norms = tokens.new_empty(num_rows(tokens) if normalize else 0, dtype=torch.float32)
    return normalize_tokens(tokens, norms=norms) if normalize else tokens, norms


def project_tokens_backward(
    grad: Tensor,
    tokens: Tensor,
    norms: Tensor,
    hidden: Tensor,
    projection: Tensor,
    need_hidden: bool,
    need_projection: bool,
    need_bias: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, projection and bias, None where not wanted; the same bits every time.

    ``(g - y <y, g>) / |p|`` is the gradient of ``p`` from that of ``y = p / |p|``; below a length
    of 1e-12 it is ``g / 1e-12``.

    Args:
        grad: contiguous ``[T, E]``, along one axis or several: gradient of the tokens; may be
            overwritten.
        tokens, norms: what :func:`project_tokens` returns, or the search from hidden states.
        hidden, projection: as given there, contiguous.
        need_hidden, need_projection, need_bias: whether these gradients are wanted.
        mask: bool ``[T]``, True at tokens that take part, or None. Others have no gradient, and may
            be no numbers.
    """
    T, (E, H) = num_rows(hidden), projection.shape
    dhidden = None
    if norms.numel():
        if need_hidden and hidden.element_size() == 2 and E <= MOST_UNITS:
            dhidden = torch.empty_like(hidden)
        _plan_backward(T, H, E)(grad, tokens, norms, projection, dhidden)
    grad = grad.view(T, E)
    if need_hidden and dhidden is None:
        dhidden = (grad @ projection).view_as(hidden)
    dprojection = grad.T @ taking_part(hidden.view(T, H), mask) if need_projection else None
    return dhidden, dprojection, grad.sum(0) if need_bias else None
