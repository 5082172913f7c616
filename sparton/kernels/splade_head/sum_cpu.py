"""Sum pooling in PyTorch, for CPU tensors: tiles of tokens and vocabulary, nothing of size T x V.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sparton.kernels.boundaries import read_boundaries
from sparton.kernels.segment_max.operands import check_operands, sequence_of_tokens
from sparton.kernels.splade_head.variants import activate

TOKENS_AT_ONCE = 1024
VOCABULARY_AT_ONCE = 4096


def _tiles(T: int, V: int) -> Iterator[tuple[slice, slice]]:
    for t in range(0, T, TOKENS_AT_ONCE):
        for v in range(0, V, VOCABULARY_AT_ONCE):
            yield slice(t, min(t + TOKENS_AT_ONCE, T)), slice(v, min(v + VOCABULARY_AT_ONCE, V))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if bias is None else logits + bias.to(logits.dtype)


def splade_head_sum_forward_cpu(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    activation: str = "relu",
) -> Tensor:
    """Sums of the activated logits over each sequence, fp32 ``[N, V]``; also takes float64
    operands, which it sums in float64."""
    check_operands(hidden, weight, bias, cu_seqlens)
    T, V = hidden.shape[0], weight.shape[0]
    read_boundaries("cu_seqlens", cu_seqlens, T)
    sequences = sequence_of_tokens(cu_seqlens, T)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    reps = hidden.new_zeros((cu_seqlens.numel() - 1, V), dtype=dtype)
    for t, v in _tiles(T, V):
        logits = _logits(hidden[t], weight[v], None if bias is None else bias[v])
        reps[:, v].index_add_(0, sequences[t], activate(logits, activation))
    return reps.float()


def splade_head_sum_backward_cpu(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str = "relu",
    need_hidden: bool = True,
    need_weight: bool = True,
    need_bias: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Arguments and results of
    :func:`~sparton.kernels.splade_head.sum_backward.splade_head_sum_backward`."""
    T, V = hidden.shape[0], weight.shape[0]
    sequences = sequence_of_tokens(cu_seqlens, T)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    dhidden = hidden.new_zeros(hidden.shape, dtype=dtype) if need_hidden else None
    dweight = weight.new_zeros(weight.shape, dtype=dtype) if need_weight else None
    dbias = torch.zeros_like(bias, dtype=dtype) if need_bias and bias is not None else None
    for t, v in _tiles(T, V):
        logits = _logits(hidden[t], weight[v], None if bias is None else bias[v])
        slope = 1 / (1 + logits)
        if activation == "log1p_relu":
            slope = slope / (1 + activate(logits, "relu"))
        g = torch.where(logits <= 0, 0, grad[sequences[t], v].to(dtype) * slope)
        if dhidden is not None:
            dhidden[t].addmm_(g, weight[v].to(dtype))
        if dweight is not None:
            dweight[v].addmm_(g.T, hidden[t].to(dtype))
        if dbias is not None:
            dbias[v].add_(g.sum(0))
    return (
        None if dhidden is None else dhidden.to(hidden.dtype),
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )
