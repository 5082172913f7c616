"""Packed sequences: N sequences of unequal length laid end to end along one token axis.

T tokens in all, N sequences, S the longest of them.
Sequence n owns the tokens ``cu_seqlens[n] : cu_seqlens[n + 1]``.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def cu_seqlens_of(lengths: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Boundaries ``[N + 1]`` of sequences with ``lengths [N]`` tokens; starts at 0, ends at T."""
    return F.pad(lengths.cumsum(0, dtype=dtype), (1, 0))


def rows_of(sequences: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Where the tokens of some sequences lie.

    Args:
        sequences: int64 ``[M]``, numbers of sequences in any order; -1 stands for an empty one.
        cu_seqlens: int ``[N + 1]``.

    Returns:
        the row of each token, int64, the given sequences end to end; and their own boundaries,
        int64 ``[M + 1]``.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    if lengths.numel():
        starts, lengths = starts[sequences], lengths[sequences].masked_fill(sequences < 0, 0)
    else:
        starts = lengths = torch.zeros_like(sequences)
    own = cu_seqlens_of(lengths)
    rows = torch.repeat_interleave(starts - own[:-1], lengths)
    return rows + torch.arange(rows.numel(), device=rows.device), own


def ranges_within(
    cu_seqlens: Tensor | Sequence[int], most_tokens: int, most_sequences: int | None = None
) -> Iterator[tuple[int, int]]:
    """Consecutive sequences ``first : last`` within both limits, but never none; a sequence that
    exceeds the limit of tokens is alone. The boundaries are read on the host."""
    bounds = torch.as_tensor(cu_seqlens, dtype=torch.int64, device="cpu")
    first, number = 0, bounds.numel() - 1
    while first < number:
        fitting = int(torch.searchsorted(bounds, bounds[first] + most_tokens, right=True)) - 1
        last = min(max(fitting, first + 1), number)
        if most_sequences is not None:
            last = min(last, first + most_sequences)
        yield first, last
        first = last


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
