"""Numbers rounded to FP8 (e4m3) within a kernel."""

import torch
import triton
import triton.language as tl

LARGEST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


@triton.jit
def scaled_to_e4m3(x, amax):
    """fp32 ``x [R, C]``, of which ``amax [R]`` becomes the largest e4m3, to be rounded where it is
    stored. NaN stays NaN, and what is above its row's ``amax`` becomes that."""
    x *= tl.div_rn(LARGEST, amax)[:, None]
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def e4m3_scale(amax):
    """What e4m3 numbers of :func:`scaled_to_e4m3` are to be multiplied with."""
    return tl.div_rn(amax, LARGEST)
