"""The same algorithm in PyTorch, for CPU tensors: maximum and its token, nothing of size T x V.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

from itertools import pairwise

import torch
from torch import Tensor

from sparton.kernels.boundaries import ranges_within, read_boundaries
from sparton.kernels.segment_max.operands import check_operands
from sparton.kernels.splade_head.variants import activate

LOGITS_AT_ONCE = 2**22
TOKENS_AT_ONCE = 1024


def _first_maximum(block: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum over the tokens and the first that attains it. NaN is ignored beside other logits;
    where there are none (-inf counts as none), the maximum is NaN."""
    best, token = block.max(dim=0)
    if best.isnan().any():
        best, token = block.nan_to_num(nan=float("-inf"), posinf=float("inf")).max(dim=0)
    return best.masked_fill(best == float("-inf"), float("nan")), token


@torch.autocast("cpu", enabled=False)
def splade_head_forward_cpu(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    argmax: bool = True,
    activation: str = "relu",
) -> tuple[Tensor, Tensor]:
    """Arguments and results of :func:`~sparton.kernels.segment_max.forward.segment_max_forward`,
    in tiles of at most LOGITS_AT_ONCE logits (or one vocabulary row). Also takes float64; the
    representations are fp32 all the same."""
    check_operands(hidden, weight, bias, cu_seqlens)
    bounds = read_boundaries("cu_seqlens", cu_seqlens, hidden.shape[0])
    V = weight.shape[0]
    maximum = hidden.new_full((len(bounds) - 1, V), float("-inf"))
    winners = torch.full((len(bounds) - 1, V) if argmax else (0,), -1, dtype=torch.int32)
    for first, last in ranges_within(bounds, TOKENS_AT_ONCE):
        low, high = bounds[first], bounds[last]
        tile = max(LOGITS_AT_ONCE // max(high - low, 1), 1)
        for v in range(0, V, tile):
            logits = hidden[low:high] @ weight[v : v + tile].T
            for n in range(first, last):
                if bounds[n] == bounds[n + 1]:
                    continue
                block = logits[bounds[n] - low : bounds[n + 1] - low]
                best = maximum[n, v : v + tile]
                if not argmax:  # much faster, and right where all is finite
                    torch.amax(block, 0, out=best)
                if argmax or not best.sum().isfinite():
                    best[:], token = _first_maximum(block)
                    if argmax:
                        winners[n, v : v + tile] = token
                        winners[n, v : v + tile] += bounds[n]
    logits = maximum.to(torch.promote_types(maximum.dtype, torch.float32))
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    reps = activate(logits, activation).float()
    reps[[n for n, (start, stop) in enumerate(pairwise(bounds)) if start == stop]] = 0
    return reps, winners


@torch.autocast("cpu", enabled=False)
def splade_head_backward_cpu(
    grad: Tensor,
    reps: Tensor,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    *,
    bias_dtype: torch.dtype | None,
    need_hidden: bool = True,
    need_weight: bool = True,
    activation: str = "relu",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Arguments and results of :func:`~sparton.kernels.segment_max.backward.segment_max_backward`,
    as products with the sparse ``[T, V]`` matrix of the active entries."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    n, v = (reps > 0).nonzero(as_tuple=True)
    values = reps[n, v].to(dtype)
    if activation == "log1p_relu":
        values = values + values.expm1()
    g = grad[n, v].to(dtype) * torch.exp(-values)
    tokens = argmax[n, v].long()
    size = (hidden.shape[0], weight.shape[0])
    logit_grads = torch.sparse_coo_tensor(torch.stack((tokens, v)), g, size, check_invariants=False)
    dhidden = dweight = dbias = None
    if need_hidden:
        dhidden = (logit_grads @ weight.to(dtype)).to(hidden.dtype)
    if need_weight:
        dweight = (logit_grads.T @ hidden.to(dtype)).to(weight.dtype)
    if bias_dtype is not None:
        dbias = g.new_zeros(weight.shape[0]).index_add_(0, v, g).to(bias_dtype)
    return dhidden, dweight, dbias
