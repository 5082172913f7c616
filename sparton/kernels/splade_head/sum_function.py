"""Sum pooling as a PyTorch operator, as function.py has one for max pooling.

The backward computes the logits again: nothing is saved but the operands.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sparton.kernels.operator import Operator
from sparton.kernels.segment_max.operands import check_operands
from sparton.kernels.splade_head.sum_cpu import (
    splade_head_sum_backward_cpu,
    splade_head_sum_forward_cpu,
)


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str
) -> Tensor:
    operands = (hidden, weight, bias, cu_seqlens)
    if not hidden.is_cuda:
        return splade_head_sum_forward_cpu(*operands, activation=activation)
    from sparton.kernels.segment_max.forward import segment_max_forward

    return segment_max_forward(*operands, pooling="sum", activation=activation)[0]


def _fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str
) -> Tensor:
    check_operands(hidden, weight, bias, cu_seqlens)
    shape = (cu_seqlens.shape[0] - 1, weight.shape[0])
    return hidden.new_empty(shape, dtype=torch.float32)


def _backward_cuda() -> Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]:
    from sparton.kernels.splade_head.sum_backward import splade_head_sum_backward

    return splade_head_sum_backward


sum_head = Operator("sparton::splade_head_sum", _forward, fake=_fake)
sum_head.differentiable(
    ("hidden", "weight", "bias"), splade_head_sum_backward_cpu, cuda=_backward_cuda
)
