"""The SPLADE head as PyTorch operators: autograd, torch.compile, autocast.

N sequences, T packed tokens, D hidden, V vocabulary.

Both operators are registered with torch.library, so that a compiled encoder keeps one graph. CUDA
tensors run the Triton kernels, CPU tensors the PyTorch version of the same algorithm; Triton is
imported when the first CUDA tensor arrives.
"""

from typing import Any, cast

import torch
from torch import Tensor

from sparton.kernels.boundaries import int32_boundaries
from sparton.kernels.dispatch import cast_for_autocast
from sparton.kernels.segment_max.operands import check_operands
from sparton.kernels.splade_head.cpu import splade_head_backward_cpu, splade_head_forward_cpu
from sparton.kernels.splade_head.fp8_cpu import splade_head_forward_fp8_cpu
from sparton.kernels.splade_head.memory import HeadMemory
from sparton.kernels.splade_head.sum_function import sum_op
from sparton.kernels.splade_head.token_topk import token_topk_op
from sparton.kernels.splade_head.variants import Activation, Pooling, check_variant


@torch.library.custom_op("sparton::splade_head", mutates_args=())
def _forward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str,
    fp8: bool,
    argmax: bool,
) -> tuple[Tensor, Tensor]:
    forward = splade_head_forward_fp8_cpu if fp8 else splade_head_forward_cpu
    if hidden.is_cuda and fp8:
        from sparton.kernels.splade_head.fp8 import splade_head_forward_fp8

        forward = splade_head_forward_fp8
    elif hidden.is_cuda:
        from sparton.kernels.segment_max.forward import segment_max_forward

        forward = segment_max_forward
    return forward(hidden, weight, bias, cu_seqlens, activation=activation, argmax=argmax)


@_forward_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str,
    fp8: bool,
    argmax: bool,
) -> tuple[Tensor, Tensor]:
    check_operands(hidden, weight, bias, cu_seqlens)
    shape = (cu_seqlens.shape[0] - 1, weight.shape[0])
    reps = hidden.new_empty(shape, dtype=torch.float32)
    return reps, hidden.new_empty(shape if argmax else (0,), dtype=torch.int32)


@torch.library.custom_op("sparton::splade_head_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    reps: Tensor,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    activation: str,
    bias_dtype: torch.dtype | None,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    backward = splade_head_backward_cpu
    if hidden.is_cuda:
        from sparton.kernels.segment_max.backward import segment_max_backward

        backward = segment_max_backward
    gradients = backward(
        grad,
        reps,
        argmax,
        hidden,
        weight,
        cu_seqlens,
        activation=activation,
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
    cu_seqlens: Tensor,
    activation: str,
    bias_dtype: torch.dtype | None,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = hidden.new_empty(0)
    return (
        hidden.new_empty(hidden.shape) if need_hidden else nothing,
        weight.new_empty(weight.shape) if need_weight else nothing.clone(),
        nothing.clone()
        if bias_dtype is None
        else weight.new_empty(weight.shape[0], dtype=bias_dtype),
    )


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    # The winners have no gradient: it need not be made of zeros.
    ctx.set_materialize_grads(False)
    hidden, weight, bias, cu_seqlens, ctx.activation, *_ = inputs
    ctx.save_for_backward(*output, hidden, weight, cu_seqlens)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    need_hidden, need_weight, need_bias, *_ = ctx.needs_input_grad
    dhidden, dweight, dbias = _backward_op(
        grad,
        *ctx.saved_tensors,
        ctx.activation,
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
        None,
        None,
    )


_forward_op.register_autograd(_backward, setup_context=_setup_context)
token_topk_op.register_autograd(_backward, setup_context=_setup_context)


class _Repeated(torch.autograd.Function):
    """A head whose results are known: the backward alone."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *operands, reps, argmax = inputs
        _setup_context(ctx, tuple(operands), (reps, argmax))
        return reps

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, gradients[0], gradients[0])


def splade_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    pooling: Pooling = "max",
    activation: Activation = "relu",
    fp8: bool = False,
    token_topk: int | None = None,
    memory: HeadMemory | None = None,
) -> Tensor:
    """SPLADE representations of N packed sequences without materialising their logits.

    ``reps[n, v] = log1p(relu(max over the tokens t of sequence n of hidden[t] . weight[v]
    + bias[v]))``; an empty sequence gives zeros. Equal logits: the first token gets the gradient.
    Products and sums run in fp32 (on the CPU, logits are rounded to the dtype of the operands).
    Under torch.autocast ``hidden`` and ``weight`` are cast to its dtype first. Results and
    gradients are bitwise reproducible on one kind of device. A logit that is NaN is ignored by a
    maximum as long as its sequence has another; a row of nothing but NaN gives NaN, and so does a
    sum of any; -inf counts as NaN.

    Args:
        hidden: ``[T, D]`` float16, bfloat16 or float32 (float64 on the CPU).
        weight: ``[V, D]``, the same dtype (or any under autocast).
        bias: ``[V]``, any float dtype, or None.
        cu_seqlens: int32 or int64 ``[N + 1]``, boundaries of the sequences; from 0 to T,
            ascending.
        pooling: "max" as above, or "sum" for the sum over t of ``log1p(relu(.))``, as SPLADE began
            (https://arxiv.org/abs/2107.05720). Every positive logit of a sum has a gradient, so the
            backward computes the logits again; their gradients are rounded to the dtype of
            ``hidden``. Its values have an absolute error of about 1e-7 per token.
        activation: "relu" as above, or "log1p_relu" for a second log1p, as OpenSearch's models use
            it (https://arxiv.org/abs/2504.14839).
        fp8: look for the maxima on operands rounded to FP8 (e4m3, one scale per token and per
            vocabulary row), then compute the logits of the tokens found from the given operands.
            Near-ties may go to another token. For float16 and bfloat16, on GPUs of compute
            capability 8.9 or later; CPU tensors run an emulation.
        token_topk: only so many of the largest logits of each token enter the maximum, among equal
            ones those of the first rows of ``weight``; None for all. Logits then lie in memory for
            a few tokens at a time, 128 MiB of them on a GPU, beside 12 bytes for each of the
            T times ``token_topk`` entries. NaN counts as the largest and is never ignored.
        memory: keeps the maxima of a call without a graph for one that encodes the same texts with
            a graph; see :class:`HeadMemory`. A sum keeps nothing.

    Returns:
        fp32 ``[N, V]``. Differentiable once, with respect to hidden, weight and bias; gradients
        come in the dtype of each.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an unknown name, what fp8
            does not serve (sum pooling, other operands, an older GPU), ``token_topk`` with sum
            pooling or fp8, or on a CPU boundaries that do not ascend from 0 to T.
    """
    check_variant(pooling, activation, fp8, token_topk)
    cu_seqlens = int32_boundaries("cu_seqlens", cu_seqlens)
    hidden, weight = cast_for_autocast(hidden, weight)
    operands = (hidden, weight, bias)
    check_operands(*operands, cu_seqlens)
    if pooling == "sum":
        return sum_op(*operands, cu_seqlens, activation)
    if memory is not None and memory.repeats:
        found = memory.next((cu_seqlens.shape[0] - 1, weight.shape[0]))
        if found is not None:
            return cast(Tensor, _Repeated.apply(*operands, cu_seqlens, activation, *found))
        memory = None
    differentiate = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in operands
    )
    wants_argmax = differentiate or memory is not None
    if token_topk is None:
        reps, argmax = _forward_op(*operands, cu_seqlens, activation, fp8, wants_argmax)
    else:
        reps, argmax = token_topk_op(*operands, cu_seqlens, activation, token_topk, wants_argmax)
    if memory is not None:
        memory.keep(reps, argmax)
    return reps
