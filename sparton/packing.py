"""Packed sequences: N sequences of unequal length laid end to end along one token axis.

T tokens in all, N sequences, S the longest of them.
Sequence n owns the tokens ``cu_seqlens[n] : cu_seqlens[n + 1]``.
"""

import torch
from torch import Tensor


def sequence_ids(cu_seqlens: Tensor, total: int) -> Tensor:
    """Index of the sequence that owns each token.

    Args:
        cu_seqlens: int ``[N + 1]``, starts at 0, ends at ``total``.
        total: T. Passed in so that no device-to-host copy is needed.

    Returns:
        int64 ``[T]``.
    """
    lengths = cu_seqlens.diff().long()
    sequences = torch.arange(lengths.numel(), device=lengths.device)
    return torch.repeat_interleave(sequences, lengths, output_size=total)


def padded_slots(cu_seqlens: Tensor, total: int, max_seqlen: int) -> Tensor:
    """Row of each packed token in the flattened padded layout ``[N * S]``; int64 ``[T]``."""
    owners = sequence_ids(cu_seqlens, total)
    positions = torch.arange(total, device=cu_seqlens.device) - cu_seqlens.long()[owners]
    return owners * max_seqlen + positions


def pad(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int, fill: float = 0) -> Tensor:
    """Packed ``[T, ...]`` to padded ``[N, S, ...]``; differentiable, backward without atomics."""
    num_sequences = cu_seqlens.numel() - 1
    slots = padded_slots(cu_seqlens, packed.shape[0], max_seqlen)
    flat = packed.new_full((num_sequences * max_seqlen, *packed.shape[1:]), fill)
    return flat.index_copy(0, slots, packed).unflatten(0, (num_sequences, max_seqlen))


def unpad(padded: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Padded ``[N, S, ...]`` back to packed ``[T, ...]``; the inverse of :func:`pad`."""
    slots = padded_slots(cu_seqlens, total, padded.shape[1])
    return padded.flatten(0, 1).index_select(0, slots)


def padding_mask(cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """True where a padded slot holds a real token; bool ``[N, S]``."""
    positions = torch.arange(max_seqlen, device=cu_seqlens.device)
    return positions < cu_seqlens.diff()[:, None]
