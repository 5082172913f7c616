"""Boundaries of packed sequences, on any device; imports no Triton.

N sequences, T tokens. Sequence n owns the tokens ``cu_seqlens[n] : cu_seqlens[n + 1]``.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
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
    Batches of more tokens are refused by :func:`check_rows`."""
    check_boundaries(name, cu_seqlens)
    # To ask a tensor for what it is costs the host time.
    if cu_seqlens.dtype == torch.int32:
        return cu_seqlens
    if not cu_seqlens.is_cuda:  # where the host reads them; a GPU would have one more launch
        cu_seqlens = within_int32(cu_seqlens)
    return cu_seqlens.to(torch.int32)


def within_int32(numbers: Tensor) -> Tensor:
    """Integers that are to be int32: those that it cannot hold become its largest or its smallest
    number, which no check lets pass, where a cast leaves the lower bits."""
    return numbers if numbers.dtype == torch.int32 else numbers.clamp(-(2**31), 2**31 - 1)


def check_rows(name: str, rows: int) -> None:
    """Raise ValueError unless int32 can count so many tokens."""
    if rows >= 2**31:
        raise ValueError(
            f"{name} have {rows} tokens, and token numbers are int32 (fewer than 2**31); take the "
            "batch in parts"
        )


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


def cu_seqlens_of(lengths: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Boundaries ``[N + 1]`` of sequences with ``lengths [N]`` tokens; starts at 0, ends at T."""
    return F.pad(lengths.cumsum(0, dtype=dtype), (1, 0))


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


def check_slice(start: int, stop: int, number: int) -> None:
    """Refuse a part of a number of sequences that there is not, or that counts from their end.

    Raises:
        ValueError: names both.
    """
    if not 0 <= start <= stop <= number:
        raise ValueError(f"{start} : {stop} of {number}: must be 0 <= start <= stop <= {number}")


def rows_of(sequences: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Where the tokens of some sequences lie.

    Args:
        sequences: int64 ``[M]``, numbers of sequences in any order; -1 stands for an empty one.
        cu_seqlens: int ``[N + 1]``.

    Returns:
        the row of each token, int64, the given sequences end to end; and their own boundaries,
        int64 ``[M + 1]``.
    """
    starts = cu_seqlens[sequences].long()
    # For -1, that is the first boundary less the last one.
    lengths = (cu_seqlens[sequences + 1] - starts).clamp_min_(0)
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
    while first + 1 < number:
        fitting = int(torch.searchsorted(bounds, bounds[first] + most_tokens, right=True)) - 1
        last = min(max(fitting, first + 1), number)
        if most_sequences is not None:
            last = min(last, first + most_sequences)
        yield first, last
        first = last
    if first < number:  # the last one, alone
        yield first, number
