"""Sum pooling as a PyTorch operator, as function.py has one for max pooling.

The backward computes the logits again: nothing is saved but the operands.
"""

import torch
from torch import Tensor

from sparton.kernels.dispatch import late
from sparton.kernels.operator import Operator
from sparton.kernels.segment_max.operands import check_operands
from sparton.kernels.splade_head.sum_cpu import (
    splade_head_sum_backward_cpu,
    splade_head_sum_forward_cpu,
)

_segment_max = late("sparton.kernels.segment_max.forward.segment_max_forward")


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str
) -> Tensor:
    operands = (hidden, weight, bias, cu_seqlens)
    if not hidden.is_cuda:
        return splade_head_sum_forward_cpu(*operands, activation=activation)
    return _segment_max()(*operands, pooling="sum", activation=activation)[0]


def _fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str
) -> Tensor:
    check_operands(hidden, weight, bias, cu_seqlens)
    shape = (cu_seqlens.shape[0] - 1, weight.shape[0])
    return hidden.new_empty(shape, dtype=torch.float32)


sum_head = Operator("sparton::splade_head_sum", _forward, fake=_fake)
sum_head.differentiable(
    ("hidden", "weight", "bias"),
    splade_head_sum_backward_cpu,
    cuda=late("sparton.kernels.splade_head.sum_backward.splade_head_sum_backward"),
)
