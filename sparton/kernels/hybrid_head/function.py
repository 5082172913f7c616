"""The paper's head as PyTorch operators: autograd, torch.compile, autocast.

B sequences, S tokens of the longest, D hidden, V vocabulary.

CUDA tensors run library products and Triton kernels, CPU tensors the PyTorch version of the same
algorithm.
"""

import torch
from torch import Tensor

from sparton.kernels.dispatch import cast_for_autocast, late
from sparton.kernels.hybrid_head.cpu import hybrid_head_backward_cpu, hybrid_head_forward_cpu
from sparton.kernels.hybrid_head.logits import check_padded_operands
from sparton.kernels.operator import Operator


def _fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor
) -> tuple[Tensor, Tensor]:
    check_padded_operands(hidden, weight, bias, mask)
    shape = (hidden.shape[0], weight.shape[0])
    reps = hidden.new_empty(shape, dtype=torch.float32)
    return reps, hidden.new_empty(shape, dtype=torch.int64)


_head = Operator(
    "sparton::hybrid_head",
    hybrid_head_forward_cpu,
    fake=_fake,
    cuda=late("sparton.kernels.hybrid_head.forward.hybrid_head_forward"),
    keeps="argmax",
)
_head.differentiable(
    ("hidden", "weight", "bias"),
    hybrid_head_backward_cpu,
    results=("reps", "argmax"),
    cuda=late("sparton.kernels.hybrid_head.backward.hybrid_head_backward"),
)


def hybrid_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor) -> Tensor:
    """SPLADE representations of a padded batch as the Sparton paper computes them.

    The mathematics of :func:`~sparton.kernels.splade_head.splade_head_reference` over the tokens
    where ``mask`` is True. Logits are rounded to the dtype of the operands before the maximum;
    among equal ones the first token gets the gradient. Under torch.autocast ``hidden`` and
    ``weight`` are cast to its dtype first. On a GPU the gradients of hidden, weight and bias are
    sums of atomic additions, so that their last bits differ from call to call.

    Args:
        hidden: ``[B, S, D]`` float16, bfloat16 or float32 (float64 on the CPU).
        weight: ``[V, D]``, the same dtype (or any under autocast).
        bias: ``[V]``, any float dtype, or None.
        mask: bool ``[B, S]``, True at real tokens.

    Returns:
        fp32 ``[B, V]``. Differentiable once; gradients come in the dtype of each operand.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    hidden, weight = cast_for_autocast(hidden, weight)
    check_padded_operands(hidden, weight, bias, mask)
    return _head(hidden, weight, bias, mask)
