"""The paper's head as PyTorch operators: autograd, torch.compile, autocast.

B sequences, S tokens of the longest, D hidden, V vocabulary.

CUDA tensors run library products and Triton kernels, CPU tensors the PyTorch version of the same
algorithm; Triton is imported when the first CUDA tensor arrives.
"""

from typing import Any

import torch
from torch import Tensor

from sparton.kernels.dispatch import cast_for_autocast
from sparton.kernels.hybrid_head.cpu import hybrid_head_backward_cpu, hybrid_head_forward_cpu
from sparton.kernels.hybrid_head.logits import check_padded_operands


@torch.library.custom_op("sparton::hybrid_head", mutates_args=())
def _forward_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, argmax: bool
) -> tuple[Tensor, Tensor]:
    if not hidden.is_cuda:
        return hybrid_head_forward_cpu(hidden, weight, bias, mask, argmax=argmax)
    from sparton.kernels.hybrid_head.forward import hybrid_head_forward

    return hybrid_head_forward(hidden, weight, bias, mask, argmax=argmax)


@_forward_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, argmax: bool
) -> tuple[Tensor, Tensor]:
    check_padded_operands(hidden, weight, bias, mask)
    shape = (hidden.shape[0], weight.shape[0])
    reps = hidden.new_empty(shape, dtype=torch.float32)
    return reps, hidden.new_empty(shape if argmax else (0,), dtype=torch.int64)


@torch.library.custom_op("sparton::hybrid_head_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    reps: Tensor,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias_dtype: torch.dtype | None,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    backward = hybrid_head_backward_cpu
    if hidden.is_cuda:
        from sparton.kernels.hybrid_head.backward import hybrid_head_backward

        backward = hybrid_head_backward
    gradients = backward(
        grad,
        reps,
        argmax,
        hidden,
        weight,
        bias_dtype=bias_dtype,
        need_hidden=need_hidden,
        need_weight=need_weight,
    )
    # An operator's schema knows no optional results: an unwanted one is an empty tensor.
    dhidden, dweight, dbias = (hidden.new_empty(0) if x is None else x for x in gradients)
    return dhidden, dweight, dbias


@_backward_op.register_fake
def _(
    grad: Tensor,
    reps: Tensor,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias_dtype: torch.dtype | None,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = 0 if bias_dtype is None else weight.shape[0]
    return (
        hidden.new_empty(hidden.shape if need_hidden else (0,)),
        weight.new_empty(weight.shape if need_weight else (0,)),
        weight.new_empty(rows, dtype=bias_dtype or weight.dtype),
    )


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    # The winners have no gradient: it need not be made of zeros.
    ctx.set_materialize_grads(False)
    hidden, weight, bias, _, _ = inputs
    ctx.save_for_backward(*output, hidden, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    need_hidden, need_weight, need_bias, *_ = ctx.needs_input_grad
    dhidden, dweight, dbias = _backward_op(
        grad,
        *ctx.saved_tensors,
        ctx.bias_dtype if need_bias else None,
        need_hidden,
        need_weight,
    )
    return (
        dhidden if need_hidden else None,
        dweight if need_weight else None,
        dbias if need_bias else None,
        None,
        None,
    )


_forward_op.register_autograd(_backward, setup_context=_setup_context)


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
    operands = (hidden, weight, bias)
    check_padded_operands(*operands, mask)
    differentiate = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in operands
    )
    return _forward_op(*operands, mask, differentiate)[0]
