"""Dropout whose mask is a function of places and of one seed: nothing is stored for the backward.

PyTorch's compiler draws ten rounds of Philox for each number, which takes longer than the layer
around it needs for its memory; here a number is the hash of its place.
"""

import torch
from torch import Tensor

MULTIPLIERS = 0x7FEB352D, 0x846CA68B


def draw_seed(device: torch.device) -> Tensor:
    """An int32 from PyTorch's global generator of the device, ``[]``, without a wait."""
    return torch.randint(-(2**31), 2**31 - 1, (), dtype=torch.int32, device=device)


def threshold(p: float) -> int:
    """A place is kept if the lower 31 bits of its hash are at least this number."""
    return round(p * 2**31)


def hashed_dropout(x: Tensor, p: float, seed: Tensor | None = None) -> Tensor:
    """``x`` with a share ``p`` of its numbers set to 0 and the others divided by ``1 - p``.

    Which ones is a function of their places and of the seed, int32 ``[]``; None draws one.
    """
    seed = draw_seed(x.device) if seed is None else seed
    places = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    kept = (hashed(places, seed) & 0x7FFFFFFF) >= threshold(p)
    return torch.where(kept, x * (1 / (1 - p)), 0)


def hashed(places: Tensor, seed: Tensor) -> Tensor:
    """Evenly distributed int32 from int32, a permutation for every int32 seed: the finaliser
    lowbias32 (https://nullprogram.com/blog/2018/07/31/), the seed between its two rounds."""
    first, second = (x - 2**32 if x >= 2**31 else x for x in MULTIPLIERS)
    x = (places ^ _shifted(places, 16)) * first
    x = x ^ _shifted(x, 15) ^ seed
    x = x * second
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left: int32 has a sign that PyTorch would draw along."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
