"""Self-attention whose queries, keys and values come from one matrix product, and whose gradients
go into one: no copy puts them together.

T packed tokens, N sequences, H heads, d the width of a head. Reached as
:mod:`sparton.kernels.dispatch` says.
"""

from typing import Any

import torch
from torch import Tensor

from sparton.kernels.boundaries import int32_boundaries
from sparton.kernels.dispatch import needs_operators
from sparton.kernels.varlen_attention import function
from sparton.kernels.varlen_attention.operands import AttentionOperands, attention_operands


def _operands(
    states: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> AttentionOperands:
    query, key, value = states.unbind(1)
    bounds, longest = (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen)
    return attention_operands(query, key, value, *bounds, *longest, scale)


def _forward(
    states: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, lse: bool
) -> tuple[Tensor, Tensor]:
    forward, _ = function.kernels()
    out, sums = forward(_operands(states, cu_seqlens, max_seqlen, scale), lse=lse)
    return out, out.new_empty(0, dtype=torch.float32) if sums is None else sums


def _gradient(grad: Tensor, out: Tensor, lse: Tensor, states: Tensor, *others: Any) -> Tensor:
    _, backward = function.kernels()
    gradient = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    backward(grad, _operands(states, *others), out, lse, gradients=gradient.unbind(1))
    return gradient


@torch.library.custom_op("sparton::varlen_self_attention", mutates_args=())
def _forward_op(
    states: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, lse: bool
) -> tuple[Tensor, Tensor]:
    return _forward(states, cu_seqlens, max_seqlen, scale, lse)


@_forward_op.register_fake
def _(
    states: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, lse: bool
) -> tuple[Tensor, Tensor]:
    T, _, H, d = states.shape
    sums = states.new_empty((H, T) if lse else (0,), dtype=torch.float32)
    return states.new_empty((T, H, d)), sums


@torch.library.custom_op("sparton::varlen_self_attention_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    states: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
) -> Tensor:
    return _gradient(grad, out, lse, states, cu_seqlens, max_seqlen, scale)


@_backward_op.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, states: Tensor, *others: Any) -> Tensor:
    return states.new_empty(states.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    # The sums have no gradient: it need not be made of zeros.
    ctx.set_materialize_grads(False)
    states, cu_seqlens, *ctx.sizes, _ = inputs
    ctx.save_for_backward(*output, states, cu_seqlens)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    # The operator refuses second derivatives where someone asks for them.
    run = _backward_op if torch.is_grad_enabled() or needs_operators() else _gradient
    return run(grad, *ctx.saved_tensors, *ctx.sizes), *[None] * 4


_forward_op.register_autograd(_backward, setup_context=_setup_context)


class _SelfAttention(torch.autograd.Function):
    """The operators for eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output[0]

    backward = staticmethod(_backward)


def varlen_self_attention(
    states: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float | None = None
) -> Tensor:
    """:func:`varlen_attention` of each sequence's tokens to themselves.

    Args:
        states: ``[T, 3, H, d]`` queries, keys and values of each token, float16 or bfloat16 on a
            GPU, d 16, 32, 64 or 128.
        cu_seqlens: int32 or int64 ``[N + 1]``, boundaries of the sequences; from 0 to T,
            ascending.
        max_seqlen: upper bound of the tokens of a sequence. Where one has more, an assertion fails
            on the GPU; nothing waits for that.
        scale: positive factor of the scores, ``d ** -0.5`` when None.

    Returns:
        ``[T, H, d]``, contiguous. Differentiable once; the gradient is contiguous too.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together or to the kernels, or more
            tokens than sequences of the stated length have.
    """
    if states.dim() != 4 or states.shape[1] != 3:
        raise ValueError(f"states must be [T, 3, H, d], got {tuple(states.shape)}")
    cu_seqlens = int32_boundaries("cu_seqlens", cu_seqlens)
    scale = states.shape[-1] ** -0.5 if scale is None else scale
    differentiate = torch.is_grad_enabled() and states.requires_grad
    arguments = (states, cu_seqlens, max_seqlen, scale, differentiate)
    if needs_operators():
        return _forward_op(*arguments)[0]
    return _SelfAttention.apply(*arguments) if differentiate else _forward(*arguments)[0]
