"""Sum pooling as PyTorch operators, as function.py has them for max pooling.

The backward computes the logits again: nothing is saved but the operands.
"""

from typing import Any

import torch
from torch import Tensor

from sparton.kernels.segment_max.operands import check_operands
from sparton.kernels.splade_head.sum_cpu import (
    splade_head_sum_backward_cpu,
    splade_head_sum_forward_cpu,
)


@torch.library.custom_op("sparton::splade_head_sum", mutates_args=())
def sum_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str
) -> Tensor:
    """Representations fp32 ``[N, V]``; the arguments of ``splade_head``."""
    operands = (hidden, weight, bias, cu_seqlens)
    if not hidden.is_cuda:
        return splade_head_sum_forward_cpu(*operands, activation=activation)
    from sparton.kernels.segment_max.forward import segment_max_forward

    return segment_max_forward(*operands, pooling="sum", activation=activation)[0]


@sum_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str
) -> Tensor:
    check_operands(hidden, weight, bias, cu_seqlens)
    shape = (cu_seqlens.shape[0] - 1, weight.shape[0])
    return hidden.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("sparton::splade_head_sum_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    backward = splade_head_sum_backward_cpu
    if hidden.is_cuda:
        from sparton.kernels.splade_head.sum_backward import splade_head_sum_backward

        backward = splade_head_sum_backward
    gradients = backward(
        grad,
        hidden,
        weight,
        bias,
        cu_seqlens,
        activation=activation,
        need_hidden=need_hidden,
        need_weight=need_weight,
        need_bias=need_bias,
    )
    # An operator's schema knows no optional results: an unwanted one is an empty tensor.
    dhidden, dweight, dbias = (hidden.new_empty(0) if x is None else x for x in gradients)
    return dhidden, dweight, dbias


@_backward_op.register_fake
def _(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = ((hidden, need_hidden), (weight, need_weight), (bias, need_bias))
    dhidden, dweight, dbias = (
        x.new_empty(x.shape) if need and x is not None else hidden.new_empty(0)
        for x, need in wanted
    )
    return dhidden, dweight, dbias


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    hidden, weight, bias, cu_seqlens, ctx.activation = inputs
    ctx.save_for_backward(hidden, weight, bias, cu_seqlens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    gradients = _backward_op(grad, *ctx.saved_tensors, ctx.activation, *needs)
    wanted = (x if need else None for x, need in zip(gradients, needs, strict=True))
    return *wanted, None, None


sum_op.register_autograd(_backward, setup_context=_setup_context)
