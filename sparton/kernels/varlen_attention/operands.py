"""What the operands must look like, for forward and backward.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.boundaries import check_longest, check_rows

DTYPES = (torch.float16, torch.bfloat16)
WIDTHS = (16, 32, 64, 128)


class AttentionOperands(NamedTuple):
    """Operands as the kernels read them.

    Attributes:
        query: ``[Tq, H, d]``, unit stride along d.
        key, value: ``[Tk, H, d]``, unit stride along d.
        query_cu_seqlens, key_cu_seqlens: int32 ``[N + 1]``, contiguous.
        max_query, max_key: upper bounds of the tokens of a sequence; the forward asserts them.
        scale: factor of the scores.
        window: a query sees the keys at a distance of at most this number; a negative one, all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_cu_seqlens: Tensor
    key_cu_seqlens: Tensor
    max_query: int
    max_key: int
    scale: float
    window: int = -1

    @property
    def num_problems(self) -> int:
        """H times N: heads of sequences have nothing to do with each other."""
        return self.query.shape[1] * (self.query_cu_seqlens.shape[0] - 1)


def unit_stride(x: Tensor) -> Tensor:
    """``x`` itself, if only its last stride is 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """The strides of tokens and of heads of each tensor ``[T, H, d]``."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def attention_operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    max_query: int,
    max_key: int,
    scale: float,
    window: int = -1,
) -> AttentionOperands:
    """Raise ValueError unless the operands fit together; reads no values."""
    if query.dim() != 3 or key.shape != value.shape or query.shape[1:] != key.shape[1:]:
        raise ValueError(
            "query [Tq, H, d], key and value [Tk, H, d] must agree, got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    check_rows("queries", query.shape[0])
    check_rows("keys", key.shape[0])
    if query.shape[2] not in WIDTHS:
        raise ValueError(f"heads must have a width d of {WIDTHS}, got {query.shape[2]}")
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "query, key and value must all be float16 or all bfloat16, got "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )
    bounds = (query_cu_seqlens, key_cu_seqlens)
    if query_cu_seqlens.shape != key_cu_seqlens.shape:
        raise ValueError(
            "query_cu_seqlens and key_cu_seqlens must both be [N + 1], got "
            f"{tuple(query_cu_seqlens.shape)} and {tuple(key_cu_seqlens.shape)}"
        )
    if len(devices := {x.device for x in (query, key, value, *bounds)}) > 1:
        raise ValueError(f"operands must be on one device, got {sorted(map(str, devices))}")
    check_longest("max_query", max_query, query_cu_seqlens, query.shape[0])
    check_longest("max_key", max_key, key_cu_seqlens, key.shape[0])
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    query, key, value = (unit_stride(x) for x in (query, key, value))
    query_cu_seqlens, key_cu_seqlens = (cu.contiguous() for cu in bounds)
    bounds = (query_cu_seqlens, key_cu_seqlens)
    return AttentionOperands(query, key, value, *bounds, max_query, max_key, scale, window)
