"""Self-attention whose queries, keys and values come from one matrix product, and whose gradients
go into one: no copy puts them together.

T packed tokens, N sequences, H heads, d the width of a head.
"""

import torch
from torch import Tensor

from sparton.kernels.boundaries import int32_boundaries
from sparton.kernels.operator import Operator
from sparton.kernels.varlen_attention import function
from sparton.kernels.varlen_attention.operands import AttentionOperands, attention_operands


def _operands(
    states: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int
) -> AttentionOperands:
    query, key, value = states.unbind(1)
    bounds, longest = (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen)
    # Decided here, lest a compiled graph depend on the longest sequence.
    window = -1 if window >= max_seqlen - 1 else window
    return attention_operands(query, key, value, *bounds, *longest, scale, window)


def _forward(
    states: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int, lse: bool
) -> function.Attended:
    operands = _operands(states, cu_seqlens, max_seqlen, scale, window)
    return function.Attended(*function.forward_kernels()(operands, lse=lse))


def _fake(
    states: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int
) -> function.Attended:
    T, _, H, d = states.shape
    out = states.new_empty((T, H, d))
    return function.Attended(out, out.new_empty((H, T), dtype=torch.float32))


def _gradient(
    grad: Tensor, out: Tensor, lse: Tensor, states: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scale: float, window: int,
) -> Tensor:  # fmt: skip
    operands = _operands(states, cu_seqlens, max_seqlen, scale, window)
    gradient = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    function.backward_kernels()(grad, operands, out, lse, gradients=gradient.unbind(1))
    return gradient


_operator = Operator("sparton::varlen_self_attention", _forward, fake=_fake, keeps="lse")
_operator.differentiable(("states",), _gradient, results=function.Attended._fields)


def varlen_self_attention(
    states: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    window: int | None = None,
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
        window: a token attends to those at a distance of at most this number, itself among them;
            None: to all of its sequence.

    Returns:
        ``[T, H, d]``, contiguous. Differentiable once; the gradient is contiguous too.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together or to the kernels, or more
            tokens than sequences of the stated length have.
    """
    if states.dim() != 4 or states.shape[1] != 3:
        raise ValueError(f"states must be [T, 3, H, d], got {tuple(states.shape)}")
    if window is not None and window < 0:
        raise ValueError(f"window must be None or a distance from 0 on, got {window}")
    cu_seqlens = int32_boundaries("cu_seqlens", cu_seqlens)
    scale = states.shape[-1] ** -0.5 if scale is None else scale
    return _operator(states, cu_seqlens, max_seqlen, scale, -1 if window is None else window)
