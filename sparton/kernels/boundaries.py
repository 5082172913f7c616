"""Boundaries of packed sequences as functions take them, on any device; imports no Triton.

N sequences, T tokens.
"""

from itertools import pairwise

import torch
from torch import Tensor


def check_boundaries(name: str, cu_seqlens: Tensor) -> None:
    """Raise ValueError unless ``cu_seqlens`` is int32 or int64 ``[N + 1]``; reads no values."""
    if (
        cu_seqlens.dim() != 1
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
        or cu_seqlens.shape[0] < 1
    ):
        raise ValueError(
            f"{name} must be int32 or int64 with one more entry than sequences, got "
            f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )


def int32_boundaries(name: str, cu_seqlens: Tensor) -> Tensor:
    """Checked boundaries as the kernels read them: int32, the same tensor if it is that already.
    The kernels of these functions count tokens in int32; batches of more are refused elsewhere."""
    check_boundaries(name, cu_seqlens)
    # To ask a tensor for what it is costs the host time.
    return cu_seqlens if cu_seqlens.dtype == torch.int32 else cu_seqlens.to(torch.int32)


def check_longest(name: str, longest: int, cu_seqlens: Tensor, total: int) -> None:
    """Raise ValueError if N sequences of at most ``longest`` tokens, as ``name`` states, have no
    room for ``total`` tokens; reads no values."""
    count = cu_seqlens.shape[0] - 1
    if longest * count < total:
        raise ValueError(
            f"{name}={longest} allows {count} sequences {longest * count} tokens at most, got "
            f"{total}"
        )


def read_boundaries(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """The values of ``cu_seqlens`` ``[N + 1]``, which the host reads; a GPU is waited for.

    Raises:
        ValueError: they do not ascend from 0 to ``total``, the number of tokens.
    """
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(
            f"{name} must go from 0 to the number of tokens, {total}; it goes from {bounds[0]} to "
            f"{bounds[-1]}"
        )
    for n, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise ValueError(f"{name} must ascend; entry {n} is {start} and the next one {stop}")
    return bounds
