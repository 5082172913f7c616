"""Scores and the numbers of what they belong to, in one integer that sorts both.

The bits of a positive fp32 number order like an integer. They take the upper half of a key; the
lower half counts numbers downwards, so that keys differ and the smaller number wins among equal
scores.
"""

import torch
from torch import Tensor

LOW = 2**32 - 1


def sort_keys(scores: Tensor, first: int = 0, *, non_negative: bool = False) -> Tensor:
    """Keys that order scores, and among equal scores smaller numbers, ascending.

    Args:
        scores: fp32 ``[..., N]``. NaN counts as the largest, and -0.0 as 0.0.
        first: number of the first column; fewer than 2**32 in all.
        non_negative: no score is below zero, which saves two passes.

    Returns:
        int64, the shape of scores.
    """
    if non_negative:
        bits = scores.view(torch.int32) & 0x7FFFFFFF  # the sign of NaN and of -0.0
    else:
        # fp32 as integers descend where the sign bit is set.
        bits = torch.where(scores.isnan(), torch.nan, scores + 0.0).view(torch.int32)
        bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    numbers = torch.arange(first, first + scores.shape[-1], device=scores.device)
    keys = bits.long()
    keys <<= 32
    keys |= LOW - numbers
    return keys


def from_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores fp32 and numbers int64 of keys, each in their shape."""
    bits = (keys >> 32).int()
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.view(torch.float32), LOW - (keys & LOW)
