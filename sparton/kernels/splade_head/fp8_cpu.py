"""The FP8 forward of the SPLADE head emulated in PyTorch, for tests and debugging on the CPU.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from sparton.kernels.segment_max.operands import check_fp8, check_operands
from sparton.kernels.segment_max.quantize_cpu import quantize_operands_cpu
from sparton.kernels.splade_head.cpu import splade_head_forward_cpu
from sparton.kernels.splade_head.variants import activate

ENTRIES_AT_ONCE = 4096
# Rounding to e4m3 changes a factor by 2.6 % (root mean square over a binade), hence a product by
# 3.7 %, and a logit by that much of |hidden| |weight| / sqrt(D): three standard deviations.
MARGIN = 0.11


def search_bias(tokens: Tensor, rows: Tensor, D: int, bias: Tensor | None) -> Tensor:
    """The bias for the search in FP8, fp32 ``[V]``: higher than ``bias`` by what rounding may take
    from a logit, lest a slightly positive entry be taken for a zero. ``tokens`` and ``rows`` are
    the norms of the operands' rows of D elements, fp32 ``[T]`` and ``[V]``."""
    longest = tokens.nan_to_num(nan=0.0, posinf=0.0).max() if tokens.numel() else 0.0
    margin = rows * (longest * (MARGIN / D**0.5))
    return margin if bias is None else margin + bias


def splade_head_forward_fp8_cpu(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    argmax: bool = True,
    activation: str = "relu",
) -> tuple[Tensor, Tensor]:
    """Emulates :func:`~sparton.kernels.splade_head.fp8.splade_head_forward_fp8` for CPU tensors:
    the same operands in e4m3, multiplied in fp32. It is slower than the forward without FP8."""
    check_operands(hidden, weight, bias, cu_seqlens)
    check_fp8(hidden)
    (T, D), V = hidden.shape, weight.shape[0]
    norms = hidden.new_empty(T, dtype=torch.float32), weight.new_empty(V, dtype=torch.float32)
    hidden8, weight8, (_, scale) = quantize_operands_cpu(
        hidden, weight, by="weight_row", norms=norms
    )
    operands = hidden8[:, :D].float(), weight8[:, :D].float() * scale[:, None]
    with torch.autocast("cpu", enabled=False):
        raised = search_bias(*norms, D, bias)
        reps, winners = splade_head_forward_cpu(*operands, raised, cu_seqlens)
    n, v = (reps > 0).nonzero(as_tuple=True)
    for rows, columns in zip(n.split(ENTRIES_AT_ONCE), v.split(ENTRIES_AT_ONCE), strict=True):
        products = hidden[winners[rows, columns].long()].float() * weight[columns].float()
        logits = products.sum(1)
        if bias is not None:
            logits += bias[columns]
        reps[rows, columns] = activate(logits, activation)
    return reps, winners if argmax else winners.new_empty(0)
