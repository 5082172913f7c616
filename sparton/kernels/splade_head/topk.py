"""The largest entries of each representation, without the dense ``[N, V]``.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.boundaries import int32_boundaries
from sparton.kernels.dispatch import cast_for_autocast
from sparton.kernels.segment_max.operands import check_operands
from sparton.kernels.sort_keys import from_keys, sort_keys
from sparton.kernels.splade_head.function import splade_head
from sparton.kernels.splade_head.variants import Activation, Pooling

REPS_AT_ONCE = 2**24


class TopK(NamedTuple):
    """The k largest entries of each row, largest first.

    Attributes:
        values: fp32 ``[N, k]``.
        indices: int64 ``[N, k]``, vocabulary entries, different within a row.
    """

    values: Tensor
    indices: Tensor


@torch.no_grad()
def splade_head_topk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    k: int,
    *,
    pooling: Pooling = "max",
    activation: Activation = "relu",
    fp8: bool = False,
) -> TopK:
    """The k largest entries of the rows of :func:`splade_head`: what a stable descending sort of
    them would begin with.

    So among equal values the smaller index comes first, and a row with fewer than k positive
    entries goes on with value 0 and the smallest indices that have it. NaN counts as the largest.

    The vocabulary is walked in slices of at most REPS_AT_ONCE representations (and 256 rows at
    least); memory does not grow with V, nothing waits for the device. For inference: the result
    has no gradient.

    Args:
        hidden, weight, bias, cu_seqlens, pooling, activation, fp8: see :func:`splade_head`.
        k: from 1 to V.

    Raises:
        ValueError: k is no whole number in its range, or what :func:`splade_head` refuses.
    """
    V, N = weight.shape[0], cu_seqlens.numel() - 1
    if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= k <= V:
        raise ValueError(
            f"k must be a whole number from 1 to the V = {V} vocabulary entries, got {k}"
        )
    hidden, weight = cast_for_autocast(hidden, weight)
    cu_seqlens = int32_boundaries("cu_seqlens", cu_seqlens)
    check_operands(hidden, weight, bias, cu_seqlens)  # of a slice, a longer bias would fit too
    width = max(REPS_AT_ONCE // max(N, 1) // 256 * 256, 256)
    best = torch.full((N, k), -1, dtype=torch.int64, device=hidden.device)
    for v in range(0, V, width):
        rows = slice(v, v + width)
        reps = splade_head(
            hidden,
            weight[rows],
            None if bias is None else bias[rows],
            cu_seqlens,
            pooling=pooling,
            activation=activation,
            fp8=fp8,
        )
        best = torch.cat((best, sort_keys(reps, v, non_negative=True)), 1).topk(k).values
    return TopK(*from_keys(best))
