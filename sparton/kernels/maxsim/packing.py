"""Masked tokens taken out of a batch, and back; on the device, without waiting for it.

N sequences, T tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Compacted(NamedTuple):
    """The tokens that take part, moved together in order.

    Attributes:
        tokens: as many rows as before, ``[T, E]``: how many are in use only the device knows. Those
            behind the last sequence are copies of some row.
        cu_seqlens: int32 ``[N + 1]``, boundaries among the rows in use.
        positions: int32 ``[T]``, the row that each one came from.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    positions: Tensor


def sequence_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence that each token belongs to, int64 ``[T]``."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], tokens, right=True)


def compact_tokens(tokens: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Compacted:
    """Leave out the rows of ``tokens`` ``[T, E]`` where ``mask`` (bool ``[T]``) is False."""
    T = tokens.shape[0]
    counts = torch.zeros(T + 1, dtype=torch.int32, device=mask.device)
    torch.cumsum(mask, 0, dtype=torch.int32, out=counts[1:])
    wanted = torch.arange(1, T + 1, dtype=torch.int32, device=mask.device)
    positions = torch.searchsorted(counts[1:], wanted, out_int32=True).clamp_max_(max(T - 1, 0))
    return Compacted(tokens.index_select(0, positions), counts[cu_seqlens.long()], positions)


def original_rows(rows: Tensor, positions: Tensor) -> Tensor:
    """Rows of the compacted tokens (int32, any shape, negative for none) as rows of the tokens they
    came from. Gradients gathered by these rows reach every masked token as zero."""
    if positions.numel() == 0:
        return rows
    found = positions[rows.clamp_min(0).long()]
    return torch.where(rows < 0, rows, found)
