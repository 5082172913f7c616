"""The k largest logits of each token on a GPU; each logit is read once, and k groups of them twice.

T tokens of a tile, V vocabulary, G groups of the vocabulary; see token_topk.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.launch import Launch, cdiv, next_power_of_2

GROUP = 64  # terms whose maximum is looked at first
GROUPS_AT_ONCE = 32  # that a program looks at


@triton.jit
def _keys(logits_ptr, bias_ptr, offs_v, numbers, V):
    """Make the keys of :mod:`sparton.kernels.sort_keys` of activated logits; -1 beyond the last."""
    value = tl.load(logits_ptr + offs_v, offs_v < V, other=0.0)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + offs_v, offs_v < V, other=0.0).to(tl.float32)
    value = tl.where(value <= 0, 0.0, value)
    bits = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
    return tl.where(offs_v < V, ((bits + 1) << 32) - 1 - numbers, -1)


@triton.jit
def _maxima_kernel(
    logits_ptr, bias_ptr, maxima_ptr, V, G, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """The largest key of each group, which has the number of the group."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offs_v = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    keys = _keys(logits_ptr + row * V, bias_ptr, offs_v, groups[:, None], V)
    tl.store(maxima_ptr + row * G + groups, tl.max(keys, 1), groups < G)


@triton.jit
def _largest_kernel(
    logits_ptr, bias_ptr, maxima_ptr, values_ptr, terms_ptr, V, G, CHOSEN,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One token: choose the best groups one after the other, then the best of their entries."""
    LOW: tl.constexpr = 2**32 - 1
    row = tl.program_id(0).to(tl.int64)
    offs_g = tl.arange(0, GROUPS)
    maxima = tl.load(maxima_ptr + row * G + offs_g, offs_g < G, other=-1)
    rows = tl.arange(0, ROWS)[:, None]
    candidates = tl.full((ROWS, GROUP), -1, tl.int64)
    for i in range(CHOSEN):
        best = tl.max(maxima, 0)
        maxima = tl.where(maxima == best, -1, maxima)
        offs_v = (LOW - (best & LOW)) * GROUP + tl.arange(0, GROUP)
        keys = _keys(logits_ptr + row * V, bias_ptr, offs_v, offs_v, V)
        candidates = tl.where(rows == i, keys[None, :], candidates)
    for i in range(K):
        best = tl.max(tl.max(candidates, 1), 0)
        candidates = tl.where(candidates == best, -1, candidates)
        value = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(values_ptr + row * K + i, value)
        tl.store(terms_ptr + row * K + i, LOW - (best & LOW))


@on_its_device
def largest_of_logits(logits: Tensor, bias: Tensor | None, values: Tensor, terms: Tensor) -> None:
    """Write the k largest of ``relu(logits + bias)`` of each row, largest first, among equal ones
    the first. NaN counts as the largest.

    Args:
        logits: fp32 ``[T, V]``, contiguous.
        bias: ``[V]`` of any float dtype, contiguous, or None.
        values: where their values go, fp32 ``[T, k]``, contiguous; k from 1 to V.
        terms: where their columns go, int64 ``[T, k]``, contiguous.
    """
    (T, V), k = logits.shape, values.shape[1]
    if not T:
        return
    groups = cdiv(V, GROUP)
    chosen = min(k, groups)
    maxima = torch.empty((T, groups), dtype=torch.int64, device=logits.device)
    Launch(
        _maxima_kernel, (T, cdiv(groups, GROUPS_AT_ONCE)), V, groups,
        GROUP=GROUP, GROUPS=GROUPS_AT_ONCE,
    )(logits, bias, maxima)  # fmt: skip
    Launch(
        _largest_kernel, (T,), V, groups, chosen,
        K=k, GROUP=GROUP, GROUPS=next_power_of_2(groups), ROWS=next_power_of_2(chosen),
    )(logits, bias, maxima, values, terms)  # fmt: skip
