"""Lists of the active entries, by the row that their gradient goes to.

N sequences, T packed tokens, V vocabulary, C chunks of the vocabulary, R rows of a slab.

An entry is packed into 64 bits: the row that it reads and the gradient of its logit. Only a slab is
listed at a time, R vocabulary rows or R sequences, so that the lists stay small; there is room for
every entry to be active, so that nothing waits for the device. The order within a list is fixed,
whatever the order in which programs run: sequences ascend within a vocabulary row, vocabulary rows
ascend within a token.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Sequences and vocabulary rows that a program lists at once.
BLOCK_N, BLOCK_V = 64, 16


class VocabularySlab(NamedTuple):
    """Active entries of some vocabulary rows.

    Attributes:
        entries: int64 ``[R, N]``, see :func:`unpack`; they read tokens.
        counts: int32 ``[R]``, entries of each row.
    """

    entries: Tensor
    counts: Tensor


class TokenSlab(NamedTuple):
    """Active entries of some sequences, by bucket of tokens: a bucket is a token, or 2, 4, 8 ...
    neighbours where a sequence has more tokens than there are buckets.

    A token with more than ``share`` entries is summed by several programs, one of which takes the
    first share and the others the further ones.

    Attributes:
        entries: int64 ``[R, V]``, see :func:`unpack`; they read vocabulary rows.
        stops: int32 ``[R, K]``, where the entries of a bucket stop; they start where those of the
            bucket before it stop.
        parts: int32 ``[R, K]``, further shares up to and including those of a bucket; none where
            tokens share buckets.
        partial: fp32 ``[R, V // share, D]``, room for a sum over each further share.
        active: int16 ``[R, V]``, active entries of each chunk, relative to its start.
        counts: int32 ``[R, C, K]``, active entries of each chunk and bucket.
    """

    entries: Tensor
    stops: Tensor
    parts: Tensor
    partial: Tensor
    active: Tensor
    counts: Tensor


@triton.jit
def _load_result(reps_ptr, argmax_ptr, offs, mask, ACTIVATION: tl.constexpr):
    """Representations, and which of these entries are active: the positive ones, or without an
    activation all that have a winner."""
    if ACTIVATION == "none":
        reps = 0.0
        active = tl.load(argmax_ptr + offs, mask, -1) >= 0
    else:
        reps = tl.load(reps_ptr + offs, mask, 0.0)
        active = reps > 0
    return reps, active


@triton.jit
def load_gradient(grad_ptr, columns_ptr, offs_v, stride_gv, mask):
    """Upstream gradients of vocabulary rows, each from the column that is its own or is named."""
    columns = offs_v
    if columns_ptr is not None:
        columns = tl.load(columns_ptr + offs_v, mask, 0)
    return tl.load(grad_ptr + columns.to(tl.int64) * stride_gv, mask, 0.0)


@triton.jit
def _pack(rows, grad, reps, ACTIVATION: tl.constexpr):
    """Entries from the rows that they read, upstream gradients and representations. And the
    gradients of the logits."""
    g = grad.to(tl.float32)
    if ACTIVATION == "log1p_relu":
        reps += tl.exp(reps) - 1.0
    if ACTIVATION != "none":
        g *= tl.exp(-reps)
    bits = g.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (rows.to(tl.int64) << 32) | bits, g


@triton.jit
def unpack(entries):
    """The rows that entries read, and the gradients of their logits."""
    g = entries.to(tl.int32).to(tl.float32, bitcast=True)
    return entries.to(tl.uint64, bitcast=True) >> 32, g


@triton.jit
def bucket_shift(length, BUCKETS: tl.constexpr):
    """The bucket of a sequence's token is its position shifted right by this."""
    shift = 0
    while (length - 1) >> shift >= BUCKETS:
        shift += 1
    return shift


@triton.jit(do_not_specialize=["first_v", "last_v", "N"])
def _by_vocabulary_kernel(
    grad_ptr, columns_ptr, reps_ptr, argmax_ptr, entries_ptr, counts_ptr, dbias_ptr,
    first_v, last_v, N, V, stride_gn, stride_gv, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    ACTIVATION: tl.constexpr, LISTS: tl.constexpr, DBIAS: tl.constexpr,
):  # fmt: skip
    """BLOCK_V vocabulary rows: walk down the sequences and append the active ones."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_v = first_v + rows
    exists = offs_v < last_v
    count = tl.zeros((BLOCK_V,), tl.int32)
    dbias = tl.zeros((BLOCK_V,), tl.float32)
    for first in range(0, N, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        offs = offs_n.to(tl.int64)[:, None] * V + offs_v[None, :]
        inside = (offs_n < N)[:, None] & exists[None, :]
        reps, active = _load_result(reps_ptr, argmax_ptr, offs, inside, ACTIVATION)
        grad_ptrs = grad_ptr + offs_n.to(tl.int64)[:, None] * stride_gn
        grad = load_gradient(grad_ptrs, columns_ptr, offs_v[None, :], stride_gv, active)
        token = tl.load(argmax_ptr + offs, active & LISTS, 0)
        entries, g = _pack(token, grad, reps, ACTIVATION)
        dbias += tl.sum(g, 0)
        if LISTS:
            ones = active.to(tl.int32)
            slots = count[None, :] + tl.cumsum(ones, 0) - 1
            tl.store(entries_ptr + rows[None, :] * N + slots, entries, active)
            count += tl.sum(ones, 0)
    if LISTS:
        tl.store(counts_ptr + rows, count, exists)
    if DBIAS:
        tl.store(dbias_ptr + offs_v, dbias.to(dbias_ptr.dtype.element_ty), exists)


@triton.jit(do_not_specialize=["first_n"])
def _count_kernel(
    reps_ptr, argmax_ptr, cu_ptr, active_ptr, counts_ptr, first_n, V, C,
    CHUNK: tl.constexpr, BUCKETS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One sequence and chunk: note the active entries, count them by bucket. Integers are added:
    the order does not matter."""
    row = (tl.program_id(0) // C).to(tl.int64)
    chunk = tl.program_id(0) % C
    begin = tl.load(cu_ptr + first_n + row)
    shift = bucket_shift(tl.load(cu_ptr + first_n + row + 1) - begin, BUCKETS)
    slots = tl.arange(0, CHUNK)
    offs_v = chunk * CHUNK + slots
    offs = (first_n + row) * V + offs_v
    _, active = _load_result(reps_ptr, argmax_ptr, offs, offs_v < V, ACTIVATION)
    counts_ptr += (row * C + chunk) * BUCKETS
    tl.store(counts_ptr + tl.arange(0, BUCKETS), tl.zeros((BUCKETS,), tl.int32))
    tl.debug_barrier()
    bucket = (tl.load(argmax_ptr + offs, active, begin) - begin) >> shift
    tl.atomic_add(counts_ptr + bucket, 1, active, sem="relaxed")
    targets = row * V + chunk * CHUNK + tl.cumsum(active.to(tl.int32), 0) - 1
    tl.store(active_ptr + targets, slots.to(tl.int16), active)


@triton.jit
def _place(
    grad_ptr, columns_ptr, reps_ptr, argmax_ptr, active_ptr, entries_ptr, moves, count, begin,
    shift, first_v, stride_gv, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Sort a chunk's active entries, at most SIZE, by bucket and write them to the list, where they
    lie ``moves[bucket]`` further than in the sorted chunk."""
    slots = tl.arange(0, SIZE)
    valid = slots < count
    offs_v = first_v + tl.load(active_ptr + slots, valid, 0)
    bucket = (tl.load(argmax_ptr + offs_v, valid, 0) - begin) >> shift
    keys = tl.sort(tl.where(valid, bucket * SIZE + slots, 2**31 - 1))
    bucket = tl.where(valid, keys // SIZE, 0)
    offs_v = first_v + tl.load(active_ptr + keys % SIZE, valid, 0)
    grad = load_gradient(grad_ptr, columns_ptr, offs_v, stride_gv, valid)
    reps, _ = _load_result(reps_ptr, argmax_ptr, offs_v, valid, ACTIVATION)
    entries, _ = _pack(offs_v, grad, reps, ACTIVATION)
    tl.store(entries_ptr + slots + tl.gather(moves, bucket, 0), entries, valid)


@triton.jit(do_not_specialize=["first_n"])
def _by_token_kernel(
    grad_ptr, columns_ptr, reps_ptr, argmax_ptr, cu_ptr, active_ptr, counts_ptr, stops_ptr,
    parts_ptr, entries_ptr, first_n, V, C, stride_gn, stride_gv, CHUNK: tl.constexpr,
    BUCKETS: tl.constexpr, SHARE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One sequence and chunk: copy each bucket's entries to their place in the list."""
    row = (tl.program_id(0) // C).to(tl.int64)
    chunk = tl.program_id(0) % C
    n = first_n + row
    begin = tl.load(cu_ptr + n)
    shift = bucket_shift(tl.load(cu_ptr + n + 1) - begin, BUCKETS)
    offs_b = tl.arange(0, BUCKETS)
    counts_ptr += row * C * BUCKETS
    total = tl.zeros((BUCKETS,), tl.int32)
    before = tl.zeros((BUCKETS,), tl.int32)
    for c in range(C):
        before = tl.where(chunk == c, total, before)
        total += tl.load(counts_ptr + c * BUCKETS + offs_b)
    stops = tl.cumsum(total, 0)
    if chunk == 0:
        further = tl.where(shift > 0, 0, tl.maximum(total - 1, 0) // SHARE)
        tl.store(stops_ptr + row * BUCKETS + offs_b, stops)
        tl.store(parts_ptr + row * BUCKETS + offs_b, tl.cumsum(further, 0))
    own = tl.load(counts_ptr + chunk * BUCKETS + offs_b)
    moves = stops - total + before - tl.cumsum(own, 0) + own
    count = tl.sum(own, 0)
    first_v = chunk * CHUNK
    grad_ptr += n * stride_gn
    if ACTIVATION != "none":
        reps_ptr += n * V
    argmax_ptr += n * V
    active_ptr += row * V + first_v
    entries_ptr += row * V
    if count > CHUNK // 8:
        _place(
            grad_ptr, columns_ptr, reps_ptr, argmax_ptr, active_ptr, entries_ptr, moves, count,
            begin, shift, first_v, stride_gv, CHUNK, ACTIVATION,
        )  # fmt: skip
    elif count > 0:
        _place(
            grad_ptr, columns_ptr, reps_ptr, argmax_ptr, active_ptr, entries_ptr, moves, count,
            begin, shift, first_v, stride_gv, CHUNK // 8, ACTIVATION,
        )  # fmt: skip


def slab_rows(rows: int, row_bytes: int, workspace: int) -> int:
    """How many of ``rows`` rows are listed at a time, at least one, to stay within ``workspace``
    bytes."""
    slabs = triton.cdiv(rows, max(workspace // max(row_bytes, 1), 1))
    return triton.cdiv(rows, slabs)


def vocabulary_slab(argmax: Tensor, workspace: int) -> VocabularySlab:
    """Room for lists of at most ``workspace`` bytes, or for one row; argmax: ``[N, V]``."""
    N, V = argmax.shape
    R = slab_rows(V, 8 * N + 4, workspace)
    return VocabularySlab(
        torch.empty(R, N, dtype=torch.int64, device=argmax.device),
        torch.empty(R, dtype=torch.int32, device=argmax.device),
    )


def token_slab(
    argmax: Tensor, D: int, *, chunk: int, share: int, buckets: int, workspace: int
) -> TokenSlab:
    """Room for lists of at most ``workspace`` bytes, or for one sequence; argmax: ``[N, V]``."""
    N, V = argmax.shape
    C, further = triton.cdiv(V, chunk), V // share
    R = slab_rows(N, 10 * V + 4 * (C + 2) * buckets + 4 * further * D, workspace)

    def room(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(R, *shape, dtype=dtype, device=argmax.device)

    return TokenSlab(
        entries=room(V, dtype=torch.int64),
        stops=room(buckets, dtype=torch.int32),
        parts=room(buckets, dtype=torch.int32),
        partial=room(further, D, dtype=torch.float32),
        active=room(V, dtype=torch.int16),
        counts=room(C, buckets, dtype=torch.int32),
    )


def list_by_vocabulary(
    grad: Tensor,
    columns: Tensor | None,
    reps: Tensor | None,
    argmax: Tensor,
    slab: VocabularySlab | None,
    dbias: Tensor | None,
    first: int,
    last: int,
    *,
    activation: str,
) -> None:
    """List the active entries of the vocabulary rows ``first : last``.

    Args:
        grad: ``[N, V]``, any strides, or other columns.
        columns: int32 ``[V]``, the column of ``grad`` that belongs to a row; None: its own.
        reps, argmax: contiguous ``[N, V]``; reps are not read without an activation.
        slab: to be filled; None for ``dbias`` alone.
        dbias: ``[V]``, whose rows ``first : last`` are filled, or None.
        activation: of the forward.
    """
    N, V = argmax.shape
    entries, counts = (None, None) if slab is None else slab
    _by_vocabulary_kernel[(triton.cdiv(last - first, BLOCK_V),)](
        grad, columns, reps, argmax, entries, counts, dbias, first, last, N, V, *grad.stride(),
        BLOCK_N=BLOCK_N, BLOCK_V=BLOCK_V, ACTIVATION=activation,
        LISTS=slab is not None, DBIAS=dbias is not None,
    )  # fmt: skip


def list_by_token(
    grad: Tensor,
    columns: Tensor | None,
    reps: Tensor | None,
    argmax: Tensor,
    cu_seqlens: Tensor,
    slab: TokenSlab,
    first: int,
    last: int,
    *,
    chunk: int,
    share: int,
    num_warps: int,
    activation: str,
) -> None:
    """List the active entries of the sequences ``first : last``: a stable counting sort of each
    sequence's entries by bucket.

    Args:
        grad: ``[N, V]``, any strides, or other columns.
        columns: int32 ``[V]``, the column of ``grad`` that belongs to a row; None: its own.
        reps, argmax: contiguous ``[N, V]``; reps are not read without an activation.
        cu_seqlens: int32 ``[N + 1]``.
        slab: to be filled, made with the same ``chunk`` and ``share``.
        chunk: vocabulary entries that one program sorts, a power of 2 from 16 to 2^15.
        share: most entries of a token that one program sums.
        activation: of the forward.
    """
    V, (_, C, buckets) = argmax.shape[1], slab.counts.shape
    grid = ((last - first) * C,)
    _count_kernel[grid](
        reps, argmax, cu_seqlens, slab.active, slab.counts, first, V, C,
        CHUNK=chunk, BUCKETS=buckets, ACTIVATION=activation, num_warps=num_warps,
    )  # fmt: skip
    _by_token_kernel[grid](
        grad, columns, reps, argmax, cu_seqlens, slab.active, slab.counts, slab.stops,
        slab.parts, slab.entries, first, V, C, *grad.stride(), CHUNK=chunk, BUCKETS=buckets,
        SHARE=share, ACTIVATION=activation, num_warps=num_warps,
    )  # fmt: skip
