"""The same algorithm in PyTorch, for CPU tensors.

B sequences, S tokens of the longest, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from sparton.kernels.hybrid_head.logits import check_padded_operands, logit_tiles
from sparton.kernels.splade_head.cpu import splade_head_backward_cpu


def hybrid_head_forward_cpu(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, argmax: bool = True
) -> tuple[Tensor, Tensor]:
    """Arguments and results of :func:`~sparton.kernels.hybrid_head.forward.hybrid_head_forward`.
    Also takes float64; the representations are fp32 all the same."""
    check_padded_operands(hidden, weight, bias, mask)
    (B, S, _), V = hidden.shape, weight.shape[0]
    reps = hidden.new_zeros(B, V, dtype=torch.float32)
    winners = torch.zeros((B, V) if argmax else 0, dtype=torch.int64)
    if reps.numel() == 0 or S == 0:
        return reps, winners
    for v, logits in logit_tiles(hidden, weight, bias, None):
        best, position = logits.relu().masked_fill(~mask[..., None], 0.0).max(dim=1)
        part = slice(v, v + best.shape[1])
        reps[:, part] = best.to(torch.promote_types(best.dtype, torch.float32)).log1p()
        if argmax:
            winners[:, part] = position
    return reps, winners


def hybrid_head_backward_cpu(
    grad: Tensor,
    reps: Tensor,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    need_hidden: bool = True,
    need_weight: bool = True,
    need_bias: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Arguments and results of :func:`~sparton.kernels.hybrid_head.backward.hybrid_head_backward`:
    the padded tokens are those of B sequences of equal length."""
    B, S, _ = hidden.shape
    starts = torch.arange(B + 1, dtype=torch.int32) * S
    dhidden, dweight, dbias = splade_head_backward_cpu(
        grad,
        reps,
        argmax + starts[:-1, None],
        hidden.flatten(0, 1),
        weight,
        starts,
        bias_dtype=None if bias is None or not need_bias else bias.dtype,
        need_hidden=need_hidden,
        need_weight=need_weight,
    )
    return None if dhidden is None else dhidden.view(hidden.shape), dweight, dbias
