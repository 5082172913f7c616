"""Boundaries of sequences of equal length, kept from call to call.

They follow from sizes alone, and to make them takes as long on the host as to launch a kernel.
"""

import functools

import torch
from torch import Tensor

from sparton.kernels.dispatch import needs_operators

KEPT = 64
LARGEST = 2**18


def equal_cu_seqlens(count: int, length: int, device: torch.device) -> Tensor:
    """Boundaries of ``count`` sequences of ``length`` tokens each, int32 ``[count + 1]``; for use
    on the current stream, and not to be written to.

    Only the default stream keeps tensors: nobody captures a CUDA graph there, which must own all
    that it reads, nor warms one up, in memory of which nothing may stay (torch.compile's
    "reduce-overhead"). Tracers make a tensor of their own.
    """
    if needs_operators() or count >= LARGEST:
        return _make(count, length, device)
    if device.type == "cuda" and torch._C._cuda_getCurrentRawStream(device.index):
        return _make(count, length, device)
    return _kept(count, length, device)


@functools.lru_cache(maxsize=KEPT)
def _kept(count: int, length: int, device: torch.device) -> Tensor:
    # A tensor of inference mode could not be saved for a backward.
    with torch.inference_mode(False):
        return _make(count, length, device)


def _make(count: int, length: int, device: torch.device) -> Tensor:
    if length == 0:
        return torch.zeros(count + 1, dtype=torch.int32, device=device)
    return torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device)
