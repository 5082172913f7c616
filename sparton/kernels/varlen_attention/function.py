"""Attention over packed sequences as PyTorch operators: autograd, torch.compile.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.

Reached as :mod:`sparton.kernels.dispatch` says.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparton.kernels.boundaries import int32_boundaries
from sparton.kernels.dispatch import needs_operators
from sparton.kernels.varlen_attention.operands import attention_operands


@functools.cache
def kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from sparton.kernels.varlen_attention.backward import varlen_attention_backward
    from sparton.kernels.varlen_attention.forward import varlen_attention_forward

    return varlen_attention_forward, varlen_attention_backward


def _forward(operands: tuple, lse: bool) -> tuple[Tensor, Tensor | None]:
    return kernels()[0](attention_operands(*operands), lse=lse)


def _gradients(
    grad: Tensor, out: Tensor, lse: Tensor, operands: tuple
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels()[1](grad, attention_operands(*operands), out, lse)


@torch.library.custom_op("sparton::varlen_attention", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    max_query: int,
    max_key: int,
    scale: float,
    lse: bool,
) -> tuple[Tensor, Tensor]:
    bounds = (query_cu_seqlens, key_cu_seqlens)
    out, sums = _forward((query, key, value, *bounds, max_query, max_key, scale), lse)
    # An operator's schema knows no optional results.
    return out, out.new_empty(0, dtype=torch.float32) if sums is None else sums


@_forward_op.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    Tq, H, _ = query.shape
    sums = query.new_empty((H, Tq) if others[-1] else (0,), dtype=torch.float32)
    return query.new_empty(query.shape), sums


@torch.library.custom_op("sparton::varlen_attention_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    max_query: int,
    max_key: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    bounds = (query_cu_seqlens, key_cu_seqlens)
    return _gradients(grad, out, lse, (query, key, value, *bounds, max_query, max_key, scale))


@_backward_op.register_fake
def _(
    grad: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), key.new_empty(key.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor | None]) -> None:
    # The sums have no gradient: it need not be made of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:5])
    ctx.sizes = inputs[5:8]


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    out, lse, *tensors = ctx.saved_tensors
    operands = (*tensors, *ctx.sizes)
    # The operator refuses second derivatives where someone asks for them.
    if torch.is_grad_enabled() or needs_operators():
        return *_backward_op(grad, out, lse, *operands), *[None] * 6
    return *_gradients(grad, out, lse, operands), *[None] * 6


_forward_op.register_autograd(_backward, setup_context=_setup_context)


class VarlenAttentionFunction(torch.autograd.Function):
    """The operators for eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *operands, lse = inputs
        output = _forward(tuple(operands), lse)
        _setup_context(ctx, inputs, output)
        return output[0]

    backward = staticmethod(_backward)


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
    operands = (query, key, value, *bounds, max_query, max_key, scale)
    differentiate = torch.is_grad_enabled() and any(x.requires_grad for x in operands[:3])
    if needs_operators():
        return _forward_op(*operands, differentiate)[0]
    if differentiate:
        return VarlenAttentionFunction.apply(*operands, True)
    return _forward(operands, False)[0]
