"""Masked tokens taken out of a batch, on the device, without waiting for it.

N sequences, T tokens.
"""

import torch
from torch import Tensor


def compact(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Where to find the tokens that take part, if they were moved together in order.

    Args:
        mask: bool ``[T]``, False at tokens to be left out.
        cu_seqlens: int32 ``[N + 1]``, from 0 to T.

    Returns:
        rows int32 ``[T]``, the place of each compacted token in the batch. How many there are only
        the device knows; the entries behind the last one name some row. And int32 ``[N + 1]``, the
        boundaries of the sequences among the compacted tokens.
    """
    T = mask.shape[0]
    counts = torch.zeros(T + 1, dtype=torch.int32, device=mask.device)
    torch.cumsum(mask, 0, dtype=torch.int32, out=counts[1:])
    wanted = torch.arange(1, T + 1, dtype=torch.int32, device=mask.device)
    rows = torch.searchsorted(counts[1:], wanted, out_int32=True).clamp_max_(max(T - 1, 0))
    return rows, counts[cu_seqlens.long()]
