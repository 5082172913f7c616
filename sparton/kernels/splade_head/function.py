"""The SPLADE head as PyTorch operators: autograd, torch.compile, autocast.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from sparton.kernels.boundaries import int32_boundaries
from sparton.kernels.dispatch import cast_for_autocast, late
from sparton.kernels.operator import Operator
from sparton.kernels.segment_max.operands import check_operands
from sparton.kernels.splade_head.cpu import splade_head_backward_cpu, splade_head_forward_cpu
from sparton.kernels.splade_head.fp8_cpu import splade_head_forward_fp8_cpu
from sparton.kernels.splade_head.memory import HeadMemory
from sparton.kernels.splade_head.sum_function import sum_head
from sparton.kernels.splade_head.token_topk import token_topk_forward
from sparton.kernels.splade_head.variants import Activation, Pooling, check_variant

_forward_on_cuda = late("sparton.kernels.segment_max.forward.segment_max_forward")
_fp8_on_cuda = late("sparton.kernels.splade_head.fp8.splade_head_forward_fp8")
_backward_on_cuda = late("sparton.kernels.segment_max.backward.segment_max_backward")


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str,
    fp8: bool,
    argmax: bool,
) -> tuple[Tensor, Tensor]:
    if hidden.is_cuda:
        forward = (_fp8_on_cuda if fp8 else _forward_on_cuda)()
    else:
        forward = splade_head_forward_fp8_cpu if fp8 else splade_head_forward_cpu
    return forward(hidden, weight, bias, cu_seqlens, activation=activation, argmax=argmax)


def _fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str,
    option: int,  # fp8, or token_topk
) -> tuple[Tensor, Tensor]:
    check_operands(hidden, weight, bias, cu_seqlens)
    shape = (cu_seqlens.shape[0] - 1, weight.shape[0])
    reps = hidden.new_empty(shape, dtype=torch.float32)
    return reps, hidden.new_empty(shape, dtype=torch.int32)


def _backward(
    grad: Tensor,
    reps: Tensor,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    backward = _backward_on_cuda() if hidden.is_cuda else splade_head_backward_cpu
    return backward(
        grad,
        reps,
        argmax,
        hidden,
        weight,
        cu_seqlens,
        activation=activation,
        bias_dtype=bias.dtype if need_bias and bias is not None else None,
        need_hidden=need_hidden,
        need_weight=need_weight,
    )


_head = Operator("sparton::splade_head", _forward, fake=_fake, keeps="argmax")
_token_topk_head = Operator(
    "sparton::splade_head_token_topk", token_topk_forward, fake=_fake, keeps="argmax"
)
for _each in (_head, _token_topk_head):
    _each.differentiable(("hidden", "weight", "bias"), _backward, results=("reps", "argmax"))


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
    gradients are bitwise reproducible on one kind of device. A maximum ignores products that are
    NaN or -inf as long as their sequence has another, and is NaN of nothing but these. A sum of any
    logit that is NaN is NaN; one of -inf adds nothing to it.

    Args:
        hidden: ``[T, D]`` float16, bfloat16 or float32 (float64 on the CPU).
        weight: ``[V, D]``, the same dtype (or any under autocast).
        bias: ``[V]``, any float dtype, or None.
        cu_seqlens: int32 or int64 ``[N + 1]``, boundaries of the sequences; from 0 to T,
            ascending.
        pooling: "max" as above, or "sum" for the sum over t of ``log1p(relu(.))``, as SPLADE began
            (https://arxiv.org/abs/2107.05720). Every positive logit of a sum has a gradient, so the
            backward computes the logits again; their gradients are rounded to the dtype of
            ``hidden``. Its values have an absolute error of about 1e-7 per token; on a GPU one that
            a logit of 2^31 or more goes into may be infinite or NaN.
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
        return sum_head(*operands, cu_seqlens, activation)
    head, option = (_head, fp8) if token_topk is None else (_token_topk_head, token_topk)
    arguments = (*operands, cu_seqlens, activation, option)
    if memory is None:
        return head(*arguments)
    if memory.repeats:
        found = memory.next((cu_seqlens.shape[0] - 1, weight.shape[0]))
        if found is None:
            return head(*arguments)
    else:
        found = head.keep(*arguments)
        memory.keep(*found)
    return head.repeat(found, *arguments)
