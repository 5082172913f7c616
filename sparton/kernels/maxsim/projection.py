"""Hidden states projected to embeddings, and their gradients' way back.

T tokens, H hidden, E embedding.

Narrow embeddings of unit length in 16 bits go back in one kernel: a program owns a tile of tokens
and holds all their units, so that the Jacobian of the normalisation and the product need no memory
between them. Under a mask a second one computes the gradient of the projection from the tokens that
take part, and reads no others. Other products are PyTorch's. Norms and the Jacobian are computed in
fp32, the latter from tokens in the dtype of the operands.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import KEPT_PLANS, Launch, cdiv, multiprocessors, next_power_of_2
from sparton.kernels.maxsim.normalization import EPSILON, divided_by, normalize_tokens, reached
from sparton.kernels.maxsim.operands import taking_part
from sparton.kernels.segment_max.operands import num_rows

BLOCK_T, BLOCK_H = 64, 64  # tokens of a program, hidden units of a step
WEIGHT_H = 128  # hidden units of a program, for the projection's gradient
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


@triton.jit(do_not_specialize=["T", "share"])
def _project_weight_kernel(
    grad_ptr, hidden_ptr, mask_ptr, partial_ptr, T, share,
    H: tl.constexpr, E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """``grad.T @ hidden`` of a share of the tokens, which is a multiple of BLOCK_T."""
    part = tl.program_id(0)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
    for first in range(part * share, tl.minimum(part * share + share, T), BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        takes_part = tl.load(mask_ptr + t, t < T, 0)[:, None] != 0
        t = t.to(tl.int64)[:, None]
        grad = tl.load(grad_ptr + t * E + offs_e, takes_part & (offs_e < E), 0.0)
        rows = tl.load(hidden_ptr + t * H + offs_h, takes_part & (offs_h < H), 0.0)
        total = tl.dot(tl.trans(grad), rows, total)
    ptrs = partial_ptr + (part * E + offs_e[:, None]) * H + offs_h
    tl.store(ptrs, total, (offs_e < E)[:, None] & (offs_h < H))


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan_weight(T: int, H: int, E: int, programs: int) -> tuple[int, Launch]:
    """How many programs share the tokens, and the launch."""
    block_e = min(max(next_power_of_2(E), 16), MOST_UNITS)
    tiles = cdiv(H, WEIGHT_H), cdiv(E, block_e)
    share = cdiv(T, max(programs // (tiles[0] * tiles[1]), 1) * BLOCK_T) * BLOCK_T
    parts = cdiv(T, share)
    launch = Launch(
        _project_weight_kernel, (parts, *tiles), T, share,
        H=H, E=E, BLOCK_T=BLOCK_T, BLOCK_E=block_e, BLOCK_H=WEIGHT_H, num_warps=4, num_stages=3,
    )  # fmt: skip
    return parts, launch


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
    dprojection = None
    if need_projection:
        dprojection = _projection_gradient(grad, hidden.view(T, H), mask)
    return dhidden, dprojection, grad.sum(0) if need_bias else None


def _projection_gradient(grad: Tensor, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """``grad.T @ hidden`` of the tokens that take part, ``[E, H]``."""
    (T, H), E = hidden.shape, grad.shape[1]
    if mask is None or hidden.element_size() != 2 or not T:
        return grad.T @ taking_part(hidden, mask)
    # Two programs share a multiprocessor: as fast as the library's product of all tokens.
    parts, launch = _plan_weight(T, H, E, 2 * multiprocessors(hidden.device))
    partial = torch.empty(parts, E, H, dtype=torch.float32, device=hidden.device)
    launch(grad, hidden, mask.contiguous(), partial)
    return partial.sum(0).to(hidden.dtype)
