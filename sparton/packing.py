"""Packed sequences: N sequences of unequal length laid end to end along one token axis.

T tokens in all, N sequences, S the longest of them.
Sequence n owns the tokens ``cu_seqlens[n] : cu_seqlens[n + 1]``.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of, sequence_ids


def ranges_of(total: int, size: int) -> list[range]:
    """Consecutive ranges of ``size`` that cover ``total`` rows; the last one may be shorter."""
    return [range(start, min(start + size, total)) for start in range(0, total, size)]


class Packed(NamedTuple):
    """The values of the real tokens of a padded batch, and where these tokens lay in it.

    Attributes:
        values: ``[T, ...]``, the tokens of one sequence after those of the other, in their order.
        cu_seqlens: int32 ``[N + 1]``, the boundaries of the sequences; starts at 0, ends at T.
        max_seqlen: upper bound of the sequence lengths, known on the host.
        slots: int64 ``[T]``, the place of each token among the ``N * S`` of the padded batch.
        length: S, the tokens of a row of the padded batch.
    """

    values: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    slots: Tensor
    length: int


def pack(values: Tensor, attention_mask: Tensor, *, total: int | None = None) -> Packed:
    """A padded batch without its padding.

    The host must know the number of tokens. It asks the device for it and waits for the answer,
    once in each call, unless ``total`` says it; nothing else waits. Batches that come from a
    collator are best packed, or counted, while they are still on the CPU.

    Args:
        values: ``[N, S, ...]`` of any dtype: token ids, hidden states, embeddings.
        attention_mask: ``[N, S]`` of booleans or integers on the device of the values, nonzero at
            real tokens, as Hugging Face's tokenizers give it. Padding may lie to the left or to the
            right, or anywhere between.
        total: T, the number of tokens that the mask selects, where the host knows it. On a GPU a
            wrong number is not noticed.

    Returns:
        Values that are differentiable with respect to those given.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or on a CPU a wrong total.
    """
    mask = boolean_mask(attention_mask, "attention_mask")
    if values.dim() < 2 or mask.shape != values.shape[:2]:
        raise ValueError(
            f"a padded batch [N, S, ...] needs an attention_mask [N, S], got {tuple(values.shape)} "
            f"and {tuple(mask.shape)}"
        )
    if mask.device != values.device:
        raise ValueError(
            f"attention_mask is on {mask.device}, the values are on {values.device}: move the mask"
        )
    lengths = mask.sum(1, dtype=torch.int32)
    cu_seqlens = cu_seqlens_of(lengths, torch.int32)
    longest = mask.shape[1]
    if total is None:
        total, longest = torch.stack((cu_seqlens[-1], F.pad(lengths, (1, 0)).amax())).tolist()
    elif mask.device.type == "cpu" and total != int(cu_seqlens[-1]):
        raise ValueError(f"total={total}, but attention_mask selects {int(cu_seqlens[-1])} tokens")
    # The n-th token lies where the count of real tokens reaches n.
    counts = mask.flatten().cumsum(0, dtype=torch.int32)
    tokens = torch.arange(1, total + 1, dtype=torch.int32, device=mask.device)
    slots = torch.searchsorted(counts, tokens)
    packed = values.flatten(0, 1).index_select(0, slots)
    return Packed(packed, cu_seqlens, max(longest, 1), slots, mask.shape[1])


def unpack(packed: Packed, fill: float = 0) -> Tensor:
    """The padded batch ``[N, S, ...]``, every token where it was before :func:`pack`.

    Results for packed tokens go the same way: ``unpack(packed._replace(values=results))``. It is
    differentiable with respect to the values; other slots hold ``fill``.
    """
    return _spread(packed.values, packed.slots, packed.cu_seqlens, packed.length, fill)


def positions(cu_seqlens: Tensor, total: int, owners: Tensor | None = None) -> Tensor:
    """Place of each token in its sequence, counted from 0; int64 ``[T]``.

    Args:
        cu_seqlens, total: see :func:`sequence_ids`.
        owners: what that function returns, where it is at hand.
    """
    owners = sequence_ids(cu_seqlens, total) if owners is None else owners
    return torch.arange(total, device=cu_seqlens.device) - cu_seqlens.long()[owners]


def padded_slots(cu_seqlens: Tensor, total: int, max_seqlen: int) -> Tensor:
    """Row of each packed token in the flattened padded layout ``[N * S]``; int64 ``[T]``."""
    owners = sequence_ids(cu_seqlens, total)
    return owners * max_seqlen + positions(cu_seqlens, total, owners)


def pad(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int, fill: float = 0) -> Tensor:
    """Packed ``[T, ...]`` to padded ``[N, S, ...]``; differentiable, backward without atomics."""
    slots = padded_slots(cu_seqlens, packed.shape[0], max_seqlen)
    return _spread(packed, slots, cu_seqlens, max_seqlen, fill)


def unpad(padded: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Padded ``[N, S, ...]`` back to packed ``[T, ...]``; the inverse of :func:`pad`."""
    slots = padded_slots(cu_seqlens, total, padded.shape[1])
    return padded.flatten(0, 1).index_select(0, slots)


def padding_mask(cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """True where a padded slot holds a real token; bool ``[N, S]``."""
    places = torch.arange(max_seqlen, device=cu_seqlens.device)
    return places < cu_seqlens.diff()[:, None]


def boolean_mask(mask: Tensor, name: str) -> Tensor:
    """A mask of booleans or integers as one of booleans, True where it is nonzero.

    Raises:
        ValueError: a dtype that other meanings go with.
    """
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(
            f"{name} must hold booleans or integers, nonzero at tokens that take part, got "
            f"{mask.dtype}; of a mask that is added to scores, give mask == 0"
        )
    return mask if mask.dtype == torch.bool else mask != 0


def _spread(values: Tensor, slots: Tensor, cu_seqlens: Tensor, length: int, fill: float) -> Tensor:
    """``[T, ...]`` into ``[N, S, ...]``, each at its slot."""
    num_sequences = cu_seqlens.numel() - 1
    flat = values.new_full((num_sequences * length, *values.shape[1:]), fill)
    return flat.index_copy(0, slots, values).unflatten(0, (num_sequences, length))
