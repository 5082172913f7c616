"""The operator in plain PyTorch: the definition that every other version is tested against."""

from itertools import pairwise

import torch
from torch import Tensor


def splade_head_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    pooling: str = "max",
    activation: str = "relu",
) -> Tensor:
    """SPLADE representations of N packed sequences, differentiable by autograd.

    ``reps[n, v] = log1p(relu(max over the tokens t of sequence n of hidden[t] . weight[v]
    + bias[v]))``; the pooling "sum" instead adds ``log1p(relu(.))`` up over the tokens, the
    activation "log1p_relu" puts log1p(log1p(relu(.))) in its place. Only real tokens exist in
    packed input, so nothing is masked. The gradient of a maximum goes to the first token that
    attains it; where relu cuts off it is 0. A sequence without tokens gives a row of zeros.

    Args:
        hidden: ``[T, D]``, any float dtype; T packed tokens.
        weight: ``[V, D]``, the same dtype.
        bias: ``[V]`` or None.
        cu_seqlens: int32 ``[N + 1]``, boundaries of the sequences on the token axis.

    Returns:
        ``[N, V]`` in the dtype of ``hidden`` (so that float64 in means float64 truth out).
    """
    rows = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        if start == stop:
            rows.append(hidden.new_zeros(weight.shape[0]))
            continue
        logits = hidden[start:stop] @ weight.T
        if bias is not None:
            logits = logits + bias.to(logits.dtype)
        if pooling == "max":
            logits = logits.max(dim=0, keepdim=True).values
        values = logits.relu().log1p()
        rows.append((values.log1p() if activation == "log1p_relu" else values).sum(dim=0))
    return torch.stack(rows) if rows else hidden.new_zeros(0, weight.shape[0])
