"""Rotary positions: heads are turned by the angles of their tokens; before, RMSNorm may bring them
to one length; some are copied.

T tokens, H heads, d the width of a head. A pair of entries, d / 2 apart, turns by one angle, the
same in all heads.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.encoder_layer.tiles import programs_over_rows
from sparton.kernels.launch import Launch, cdiv, next_power_of_2

HEADS = 16  # of a token at a time
WARP_PAIRS = 256  # 16 bytes of each half for a thread, in 16 bits
BACKWARD_PROGRAMS = 16  # for each multiprocessor


@triton.jit
def _angles(ptr, t, i, HALF: tl.constexpr):
    return tl.load(ptr + t * (2 * HALF) + i, i < HALF, 0.0).to(tl.float32)


@triton.jit
def _inverse_length(u, v, EPS: tl.constexpr, HALF: tl.constexpr):
    """The inverse root mean square of heads in halves, ``[H, 1]``."""
    return 1.0 / tl.sqrt_rn(tl.sum(u * u + v * v, 1) / (2 * HALF) + EPS)[:, None]


@triton.jit
def _rotary_kernel(
    x_ptr, gain_ptr, cos_ptr, sin_ptr, out_ptr,
    SIGN: tl.constexpr, EPS: tl.constexpr, H: tl.constexpr, TURNED: tl.constexpr,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """A token, of whose heads the first TURNED are turned; SIGN -1 turns back."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_HALF)[None, :]
    cos = _angles(cos_ptr, t, i, HALF)
    sin = _angles(sin_ptr, t, i, HALF) * SIGN
    for first in tl.static_range(0, H, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)[:, None]
        inside = (h < H) & (i < HALF)
        places = (t * H + h) * (2 * HALF) + i
        u = tl.load(x_ptr + places, inside, 0.0).to(tl.float32)
        v = tl.load(x_ptr + places + HALF, inside, 0.0).to(tl.float32)
        x, y = u, v
        if gain_ptr is not None:
            inverse = _inverse_length(u, v, EPS, HALF)
            x = u * inverse * tl.load(gain_ptr + i, i < HALF, 0.0).to(tl.float32)
            y = v * inverse * tl.load(gain_ptr + HALF + i, i < HALF, 0.0).to(tl.float32)
        turns = h < TURNED
        u = tl.where(turns, x * cos - y * sin, u)
        v = tl.where(turns, y * cos + x * sin, v)
        tl.store(out_ptr + places, u.to(out_ptr.dtype.element_ty), inside)
        tl.store(out_ptr + places + HALF, v.to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["T", "programs"])
def _normed_rotary_backward_kernel(
    grad_ptr, x_ptr, gain_ptr, cos_ptr, sin_ptr, dx_ptr, dgain_ptr, T, programs,
    EPS: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th token; the gain's gradients go to ``dgain [programs, d]``."""
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK_HALF)[None, :]
    gain_u = tl.load(gain_ptr + i, i < HALF, 0.0).to(tl.float32)
    gain_v = tl.load(gain_ptr + HALF + i, i < HALF, 0.0).to(tl.float32)
    sum_u = tl.zeros((BLOCK_H, BLOCK_HALF), tl.float32)
    sum_v = tl.zeros((BLOCK_H, BLOCK_HALF), tl.float32)
    for token in range(program, T, programs):
        t = tl.cast(token, tl.int64)
        cos, sin = _angles(cos_ptr, t, i, HALF), _angles(sin_ptr, t, i, HALF)
        for first in tl.static_range(0, H, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)[:, None]
            inside = (h < H) & (i < HALF)
            places = (t * H + h) * (2 * HALF) + i
            x = tl.load(grad_ptr + places, inside, 0.0).to(tl.float32)
            y = tl.load(grad_ptr + places + HALF, inside, 0.0).to(tl.float32)
            u = tl.load(x_ptr + places, inside, 0.0).to(tl.float32)
            v = tl.load(x_ptr + places + HALF, inside, 0.0).to(tl.float32)
            x, y = x * cos + y * sin, y * cos - x * sin
            inverse = tl.where(h < H, _inverse_length(u, v, EPS, HALF), 0.0)
            u *= inverse
            v *= inverse
            sum_u += x * u
            sum_v += y * v
            x *= gain_u
            y *= gain_v
            along = tl.sum(x * u + y * v, 1)[:, None] / (2 * HALF)
            x, y = (x - u * along) * inverse, (y - v * along) * inverse
            tl.store(dx_ptr + places, x.to(dx_ptr.dtype.element_ty), inside)
            tl.store(dx_ptr + places + HALF, y.to(dx_ptr.dtype.element_ty), inside)
    dgain_ptr += program.to(tl.int64) * (2 * HALF)
    d = tl.arange(0, BLOCK_HALF)
    tl.store(dgain_ptr + d, tl.sum(sum_u, 0), d < HALF)
    tl.store(dgain_ptr + HALF + d, tl.sum(sum_v, 0), d < HALF)


def rotate(
    states: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, *, eps: float, copied: int,
    back: bool,
) -> Tensor:  # fmt: skip
    """``[T, H, d]``, what becomes of ``states [T, H, d]``, in their dtype.

    Args:
        states: contiguous.
        gain: ``[d]``, contiguous, of the normalisation of each head; None: there is none.
        cos, sin: ``[T, d]``, contiguous; the first halves of their rows are read.
        eps: of the normalisation.
        copied: the number of last heads that stay as they are.
        back: turn the other way, as gradients do.
    """
    out = torch.empty_like(states)
    if states.numel():
        sign, turned = -1.0 if back else 1.0, states.shape[1] - copied
        Launch(
            _rotary_kernel, (len(states),), SIGN=sign, EPS=eps, TURNED=turned, **_tile(states)
        )(states, gain, cos, sin, out)  # fmt: skip
    return out


def normed_rotary_backward(
    grad: Tensor, states: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradients of the states, in their dtype, and of the gain, in fp32; the same bits every
    time. All heads were normalised and turned."""
    dx = torch.empty_like(states)
    T, _, d = states.shape
    if not states.numel():
        return dx, gain.new_zeros(d, dtype=torch.float32)
    programs = programs_over_rows(states, 1, BACKWARD_PROGRAMS)
    sums = torch.empty((programs, d), dtype=torch.float32, device=states.device)
    Launch(
        _normed_rotary_backward_kernel, (programs,), T, programs, EPS=eps, **_tile(states)
    )(grad, states, gain, cos, sin, dx, sums)  # fmt: skip
    return dx, sums.sum(0)


def _tile(states: Tensor) -> dict[str, Any]:
    _, H, d = states.shape
    block_h, block_half = min(next_power_of_2(H), HEADS), next_power_of_2(d // 2)
    warps = min(cdiv(block_h * block_half, WARP_PAIRS), 8)
    return {
        "H": H, "HALF": d // 2, "BLOCK_H": block_h, "BLOCK_HALF": block_half, "num_warps": warps
    }  # fmt: skip
