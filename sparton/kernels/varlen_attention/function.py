"""Attention over packed sequences as a PyTorch operator.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.boundaries import int32_boundaries
from sparton.kernels.dispatch import late
from sparton.kernels.operator import Operator
from sparton.kernels.varlen_attention.operands import AttentionOperands, attention_operands

forward_kernels = late("sparton.kernels.varlen_attention.forward.varlen_attention_forward")
backward_kernels = late("sparton.kernels.varlen_attention.backward.varlen_attention_backward")


class Attended(NamedTuple):
    """What the forward returns: the result, and for the backward the logarithms of the sums
    ``[H, Tq]``, fp32, None without one."""

    out: Tensor
    lse: Tensor | None


def _forward(operands: AttentionOperands, lse: bool) -> Attended:
    return Attended(*forward_kernels()(operands, lse=lse))


def _fake(operands: AttentionOperands) -> Attended:
    Tq, H, _ = operands.query.shape
    out = operands.query.new_empty(operands.query.shape)
    return Attended(out, out.new_empty((H, Tq), dtype=torch.float32))


def _gradients(
    grad: Tensor, out: Tensor, lse: Tensor, operands: AttentionOperands
) -> tuple[Tensor, Tensor, Tensor]:
    return backward_kernels()(grad, operands, out, lse)


_operator = Operator("sparton::varlen_attention", _forward, fake=_fake, keeps="lse")
_operator.differentiable(("query", "key", "value"), _gradients, results=Attended._fields)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    max_query: int,
    max_key: int,
    *,
    scale: float | None = None,
) -> Tensor:
    """``softmax(scale * q k^T) v`` within each sequence, in both directions, without dropout.

    Query tokens of sequence n attend to the key tokens of sequence n; those of a sequence without
    keys get zeros. Scores, sums and weights are held in fp32 and rounded to 16 bits only where they
    are multiplied. Nothing is added in memory: results and gradients have the same bits every time.
    Made for sequences of some hundred tokens; right, but not faster than others, for longer ones.

    Args:
        query: ``[Tq, H, d]`` float16 or bfloat16 on a GPU, d 16, 32, 64 or 128; any strides but
            that of d, which is 1, or else it is copied.
        key, value: ``[Tk, H, d]`` in the same dtype; the same holds for their strides.
        query_cu_seqlens: int32 or int64 ``[N + 1]``, boundaries of the sequences; from 0 to Tq,
            ascending.
        key_cu_seqlens: int32 or int64 ``[N + 1]``, from 0 to Tk.
        max_query, max_key: upper bounds of the tokens of a sequence. Where one has more, an
            assertion fails on the GPU; nothing waits for that.
        scale: positive factor of the scores, ``d ** -0.5`` when None.

    Returns:
        ``[Tq, H, d]``, contiguous, in the dtype of the operands. Differentiable once, with respect
        to query, key and value; gradients are contiguous.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together or to the kernels, or more
            tokens than sequences of the stated lengths have.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    bounds = (
        int32_boundaries("query_cu_seqlens", query_cu_seqlens),
        int32_boundaries("key_cu_seqlens", key_cu_seqlens),
    )
    return _operator(attention_operands(query, key, value, *bounds, max_query, max_key, scale))
