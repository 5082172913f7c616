"""Rotary positions: queries and keys are turned by the angles of their tokens, values copied.

T tokens, H heads, d the width of a head. A pair of entries, d / 2 apart, turns by one angle, the
same in all heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import Launch, cdiv, next_power_of_2

WARP_PAIRS = 256  # 16 bytes of each half for a thread, in 16 bits


@triton.jit
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr,
    SIGN: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """A token; SIGN -1 turns back."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_ptr + t * (2 * HALF) + i, i < HALF, 0.0).to(tl.float32)
    sin = tl.load(sin_ptr + t * (2 * HALF) + i, i < HALF, 0.0).to(tl.float32) * SIGN
    inside = (h < H) & (i < HALF)
    for part in tl.static_range(3):
        places = ((t * 3 + part) * H + h) * (2 * HALF) + i
        first = tl.load(x_ptr + places, inside, 0.0)
        second = tl.load(x_ptr + places + HALF, inside, 0.0)
        if part < 2:
            u, v = first.to(tl.float32), second.to(tl.float32)
            first = (u * cos - v * sin).to(out_ptr.dtype.element_ty)
            second = (v * cos + u * sin).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + places, first, inside)
        tl.store(out_ptr + places + HALF, second, inside)


def rotate(states: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, back: bool) -> None:
    """Into ``out`` what queries and keys in ``states [T, 3, H, d]`` become, and the values.

    Args:
        states, out: contiguous, of one dtype.
        cos, sin: ``[T, d]``, contiguous; the first halves of their rows are read.
        back: turn the other way, as gradients do.
    """
    T, _, H, d = states.shape
    if not states.numel():
        return
    block_h, block_half = next_power_of_2(H), next_power_of_2(d // 2)
    Launch(
        _rotary_kernel, (T,), SIGN=-1.0 if back else 1.0, H=H, HALF=d // 2, BLOCK_H=block_h,
        BLOCK_HALF=block_half, num_warps=min(cdiv(block_h * block_half, WARP_PAIRS), 8),
    )(states, cos, sin, out)  # fmt: skip
