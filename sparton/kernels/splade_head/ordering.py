"""Lists of the SPLADE head's active entries, by the row that their gradient goes to.

N sequences, T packed tokens, V vocabulary, C chunks of the vocabulary.

Both lists are complete and in a fixed order, whatever the order in which programs run: sequences
ascend within a vocabulary entry, vocabulary entries ascend within a token. They have room for
every entry to be active, so that their size is known without asking the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class ActiveEntries(NamedTuple):
    """Active entries by destination row.

    Attributes:
        bounds: by vocabulary: int32 ``[V]``, the number of entries of row v, which start at
            ``v * N``. By token: int64 ``[T]``, where the entries of token t stop; they start where
            those of token t - 1 stop.
        sources: int32 ``[N * V]``, the row that an entry reads.
        g: fp32 ``[N * V]``, the gradient of an entry's logit.
    """

    bounds: Tensor
    sources: Tensor
    g: Tensor


@triton.jit
def _logit_grad(grad, reps, TWICE: tl.constexpr):
    """Gradient of an active logit from its representation; TWICE if that is log1p of a log1p."""
    if TWICE:
        reps += tl.exp(reps) - 1.0
    return grad * tl.exp(-reps)


@triton.jit(do_not_specialize=["N"])
def _by_vocabulary_kernel(
    grad_ptr, reps_ptr, argmax_ptr, counts_ptr, sources_ptr, g_ptr, dbias_ptr, N, V,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, TWICE: tl.constexpr,
    LISTS: tl.constexpr, DBIAS: tl.constexpr,
):  # fmt: skip
    """BLOCK_V vocabulary entries: walk down the sequences and append the active ones."""
    offs_v = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    count = tl.zeros((BLOCK_V,), tl.int32)
    dbias = tl.zeros((BLOCK_V,), tl.float32)
    for first in range(0, N, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        mask = (offs_n < N)[:, None] & (offs_v < V)[None, :]
        entries = offs_n.to(tl.int64)[:, None] * V + offs_v[None, :]
        reps = tl.load(reps_ptr + entries, mask, 0.0)
        active = reps > 0
        g = _logit_grad(tl.load(grad_ptr + entries, active, 0.0), reps, TWICE)
        dbias += tl.sum(g, 0)
        if LISTS:
            ones = active.to(tl.int32)
            slots = offs_v[None, :] * N + count[None, :] + tl.cumsum(ones, 0) - 1
            tl.store(sources_ptr + slots, tl.load(argmax_ptr + entries, active, 0), active)
            tl.store(g_ptr + slots, g, active)
            count += tl.sum(ones, 0)
    if LISTS:
        tl.store(counts_ptr + offs_v, count, offs_v < V)
    if DBIAS:
        tl.store(dbias_ptr + offs_v, dbias, offs_v < V)


@triton.jit(do_not_specialize=["T"])
def _count_kernel(reps_ptr, argmax_ptr, counts_ptr, T, V, CHUNK: tl.constexpr):
    """Active entries of one sequence and vocabulary chunk, per token. The additions are of
    integers: their order does not matter."""
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    offs_v = chunk * CHUNK + tl.arange(0, CHUNK)
    active = tl.load(reps_ptr + n * V + offs_v, offs_v < V, 0.0) > 0
    token = tl.load(argmax_ptr + n * V + offs_v, active, 0)
    tl.atomic_add(counts_ptr + chunk * T + token, 1, active, sem="relaxed")


@triton.jit(do_not_specialize=["T"])
def _by_token_kernel(
    grad_ptr, reps_ptr, argmax_ptr, cu_ptr, sums_ptr, stops_ptr, sources_ptr, g_ptr, T, V, C,
    CHUNK: tl.constexpr, WIDE: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """One sequence and vocabulary chunk: sort by token, then copy each token's run of entries to
    its place in the list.

    ``sums`` accumulates the counts chunk by chunk (tokens within a chunk), ``stops`` token by
    token (chunks within a token): one tells where a run stops in the sorted chunk, the other where
    it stops in the list.
    """
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    slots = tl.arange(0, CHUNK)
    offs_v = chunk * CHUNK + slots
    active = tl.load(reps_ptr + n * V + offs_v, offs_v < V, 0.0) > 0
    begin = tl.load(cu_ptr + n)
    position = tl.load(argmax_ptr + n * V + offs_v, active, 0) - begin
    if WIDE:
        keys = tl.where(active, position.to(tl.int64) * CHUNK + slots, 2**62)
    else:
        keys = tl.where(active, position * CHUNK + slots, 2**31 - 1)
    keys = tl.sort(keys)
    active = keys < (2**62 if WIDE else 2**31 - 1)
    token = tl.where(active, begin + (keys // CHUNK).to(tl.int32), 0).to(tl.int64)
    offs_v = chunk * CHUNK + keys % CHUNK
    row = chunk * T
    skipped = tl.load(sums_ptr + row + begin - 1, row + begin > 0, 0)
    stop_in_chunk = tl.load(sums_ptr + row + token, active, 0) - skipped
    target = slots + tl.load(stops_ptr + token * C + chunk, active, 0) - stop_in_chunk
    reps = tl.load(reps_ptr + n * V + offs_v, active, 0.0)
    g = _logit_grad(tl.load(grad_ptr + n * V + offs_v, active, 0.0), reps, TWICE)
    tl.store(sources_ptr + target, offs_v.to(tl.int32), active)
    tl.store(g_ptr + target, g, active)


def entries_by_vocabulary(
    grad: Tensor,
    reps: Tensor,
    argmax: Tensor,
    dbias: Tensor | None,
    *,
    lists: bool,
    activation: str,
) -> ActiveEntries:
    """Entries that ``dweight[v]`` sums, their sources being tokens; ``dbias`` is filled in passing.

    Args:
        grad, reps, argmax: contiguous ``[N, V]``.
        dbias: fp32 ``[V]`` to fill, or None.
        lists: False to fill nothing but ``dbias``.
        activation: of the forward.
    """
    N, V = reps.shape
    size, device = (N * V if lists else 0), reps.device
    entries = ActiveEntries(
        torch.empty(V if lists else 0, dtype=torch.int32, device=device),
        torch.empty(size, dtype=torch.int32, device=device),
        torch.empty(size, device=device),
    )
    _by_vocabulary_kernel[(triton.cdiv(V, 32),)](
        grad, reps, argmax, *entries, dbias, N, V,
        BLOCK_N=32, BLOCK_V=32, TWICE=activation == "log1p_relu",
        LISTS=lists, DBIAS=dbias is not None,
    )  # fmt: skip
    return entries


def entries_by_token(
    grad: Tensor,
    reps: Tensor,
    argmax: Tensor,
    cu_seqlens: Tensor,
    num_tokens: int,
    *,
    chunk: int,
    activation: str,
) -> ActiveEntries:
    """Entries that ``dhidden[t]`` sums, their sources being vocabulary entries: a stable counting
    sort of each sequence's entries by winning token.

    Args:
        grad, reps, argmax: contiguous ``[N, V]``.
        cu_seqlens: int32 ``[N + 1]``.
        num_tokens: T.
        chunk: vocabulary entries that one program sorts, a power of 2.
        activation: of the forward.
    """
    (N, V), T, device = reps.shape, num_tokens, reps.device
    C = triton.cdiv(V, chunk)
    counts = torch.zeros(C, T, dtype=torch.int32, device=device)
    _count_kernel[(N, C)](reps, argmax, counts, T, V, CHUNK=chunk)
    sums, stops = counts.flatten().cumsum(0), counts.T.flatten().cumsum(0)
    sources = torch.empty(N * V, dtype=torch.int32, device=device)
    g = torch.empty(N * V, device=device)
    _by_token_kernel[(N, C)](
        grad, reps, argmax, cu_seqlens, sums, stops, sources, g, T, V, C,
        CHUNK=chunk, WIDE=T * chunk >= 2**31, TWICE=activation == "log1p_relu", num_warps=16,
    )  # fmt: skip
    return ActiveEntries(stops[C - 1 :: C].contiguous(), sources, g)
