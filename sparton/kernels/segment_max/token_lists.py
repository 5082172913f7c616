"""Lists of the active entries by token (see ordering.py).

N sequences, D hidden, V vocabulary, C chunks of the vocabulary, K buckets, R sequences of a slab.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparton.kernels.launch import Step, cdiv, next_power_of_2, plan_step
from sparton.kernels.segment_max.ordering import load_gradient, load_result, pack, slab_rows

RECORD_ALIGNMENT = 128
# Up to so many chunks each program counts all of them: cheaper than another launch.
FEW_CHUNKS = 4


class TokenLists(NamedTuple):
    """Active entries of a slab of sequences, by bucket of tokens: a bucket is a token, or 2, 4,
    8 ... neighbours where a sequence has more tokens than there are buckets.

    A token with more than ``share`` entries is summed by several programs, one of which takes the
    first share and the others the further ones.

    Each of R sequences has a record of ``size`` bytes (see :func:`record`), which holds

        int32 ``[K]``, where the entries of a bucket stop; they start where those before it stop,
        int32 ``[K]``, further shares up to and including those of a bucket; none where tokens
            share buckets,
        while the record is made, int32 ``[C, K]``, active entries of each chunk and bucket, and
            int16 ``[V]``, active entries of each chunk, relative to its start,
        later in the same place fp32 ``[V // share, D]``, a sum over each further share,
        and at its end int64 ``[V]``, the entries (see :func:`unpack`); they read vocabulary rows.

    Attributes:
        rows: R.
        size: bytes of a record.
        chunk: vocabulary entries that one program sorts, a power of 2 from 16 to 2^15.
        share: most entries of a token that one program sums.
        buckets: K, a power of 2.
        lent: whether the records lie in memory that was lent.
    """

    rows: int
    size: int
    chunk: int
    share: int
    buckets: int
    lent: bool


@triton.jit
def bucket_shift(length, BUCKETS: tl.constexpr):
    """The bucket of a sequence's token is its position shifted right by this."""
    shift = 0
    while (length - 1) >> shift >= BUCKETS:
        shift += 1
    return shift


@triton.jit
def record(memory_ptr, row, size, V, BUCKETS: tl.constexpr):
    """What the record of a sequence of the slab holds, in int64 ``row``: its stops, its further
    shares, the room behind these, and its entries."""
    start = memory_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + row * size
    stops_ptr = start.to(tl.pointer_type(tl.int32), bitcast=True)
    entries_ptr = (start + (size - 8 * V)).to(tl.pointer_type(tl.int64), bitcast=True)
    return stops_ptr, stops_ptr + BUCKETS, stops_ptr + 2 * BUCKETS, entries_ptr


@triton.jit
def _buckets_of_active(
    reps_ptr, argmax_ptr, begin, shift, offs_v, V, ACTIVATION: tl.constexpr
):  # fmt: skip
    """Which entries of a sequence are active, and the bucket of each that is."""
    _, active = load_result(reps_ptr, argmax_ptr, offs_v, offs_v < V, ACTIVATION)
    return active, (tl.load(argmax_ptr + offs_v, active, begin) - begin) >> shift


@triton.jit
def _note_active(active_ptr, active, slots):
    """The active entries of a chunk, relative to its start, one after the other."""
    targets = active_ptr + tl.cumsum(active.to(tl.int32), 0) - 1
    tl.store(targets, slots.to(tl.int16), active)


@triton.jit(do_not_specialize=["first_n"])
def _count_kernel(
    reps_ptr, argmax_ptr, cu_ptr, memory_ptr, first_n, V, C, size,
    CHUNK: tl.constexpr, BUCKETS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One sequence and chunk: note its active entries and count them by bucket. Integers are added:
    the order does not matter."""
    row = (tl.program_id(0) // C).to(tl.int64)
    chunk = tl.program_id(0) % C
    n = first_n + row
    begin = tl.load(cu_ptr + n)
    shift = bucket_shift(tl.load(cu_ptr + n + 1) - begin, BUCKETS)
    _, _, counts_ptr, _ = record(memory_ptr, row, size, V, BUCKETS)
    active_ptr = (counts_ptr + C * BUCKETS).to(tl.pointer_type(tl.int16), bitcast=True)
    counts_ptr += chunk * BUCKETS
    if ACTIVATION != "none":
        reps_ptr += n * V
    slots = tl.arange(0, CHUNK)
    tl.store(counts_ptr + tl.arange(0, BUCKETS), tl.zeros((BUCKETS,), tl.int32))
    tl.debug_barrier()
    active, bucket = _buckets_of_active(
        reps_ptr, argmax_ptr + n * V, begin, shift, chunk * CHUNK + slots, V, ACTIVATION
    )
    tl.atomic_add(counts_ptr + bucket, 1, active, sem="relaxed")
    _note_active(active_ptr + chunk * CHUNK, active, slots)


@triton.jit
def _place(
    grad_ptr, columns_ptr, reps_ptr, argmax_ptr, active_ptr, entries_ptr, moves, count, begin,
    shift, first_v, summed, stride_gv, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
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
    grad = load_gradient(grad_ptr, columns_ptr, offs_v, summed, stride_gv, valid)
    reps, _ = load_result(reps_ptr, argmax_ptr, offs_v, valid, ACTIVATION)
    entries, _ = pack(offs_v, grad, reps, ACTIVATION)
    tl.store(entries_ptr + slots + tl.gather(moves, bucket, 0), entries, valid)


@triton.jit
def _sum_counts(counts_ptr, chunk, C, BUCKETS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Entries of each bucket, in all chunks and in those before ``chunk``."""
    offs_b = tl.arange(0, BUCKETS)
    total = tl.zeros((BUCKETS,), tl.int32)
    before = tl.zeros((BUCKETS,), tl.int32)
    for c in range(0, C, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            count = tl.load(counts_ptr + (c + i) * BUCKETS + offs_b, c + i < C, 0)
            total += count
            before += tl.where(c + i < chunk, count, 0)
    return total, before


@triton.jit
def _count_all(
    reps_ptr, argmax_ptr, active_ptr, chunk, C, begin, shift, V,
    CHUNK: tl.constexpr, BUCKETS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """What :func:`_count_kernel` notes of a chunk, and :func:`_sum_counts` and the chunk's own
    counts, for a program that has nobody to rely on."""
    slots = tl.arange(0, CHUNK)
    own = tl.zeros((BUCKETS,), tl.int32)
    total = tl.zeros((BUCKETS,), tl.int32)
    before = tl.zeros((BUCKETS,), tl.int32)
    for c in range(C):
        active, bucket = _buckets_of_active(
            reps_ptr, argmax_ptr, begin, shift, c * CHUNK + slots, V, ACTIVATION
        )
        count = tl.histogram(bucket, BUCKETS, active)
        total += count
        before += tl.where(c < chunk, count, 0)
        if c == chunk:
            own = count
            _note_active(active_ptr, active, slots)
    # The program reads what its threads have noted.
    tl.debug_barrier()
    return own, total, before


@triton.jit(do_not_specialize=["first_n"])
def _by_token_kernel(
    grad_ptr, columns_ptr, reps_ptr, argmax_ptr, cu_ptr, memory_ptr, first_n, V, C, size,
    summed, stride_gn, stride_gv, CHUNK: tl.constexpr, BUCKETS: tl.constexpr, SHARE: tl.constexpr,
    ACTIVATION: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One sequence and chunk: copy each bucket's entries to their place in the list. If nobody
    COUNTED them before, every program of the sequence does."""
    row = (tl.program_id(0) // C).to(tl.int64)
    chunk = tl.program_id(0) % C
    n = first_n + row
    begin = tl.load(cu_ptr + n)
    shift = bucket_shift(tl.load(cu_ptr + n + 1) - begin, BUCKETS)
    offs_b = tl.arange(0, BUCKETS)
    stops_ptr, parts_ptr, counts_ptr, entries_ptr = record(memory_ptr, row, size, V, BUCKETS)
    first_v = chunk * CHUNK
    active_ptr = (counts_ptr + C * BUCKETS).to(tl.pointer_type(tl.int16), bitcast=True) + first_v
    grad_ptr += n * stride_gn
    if ACTIVATION != "none":
        reps_ptr += n * V
    argmax_ptr += n * V
    if COUNTED:
        own = tl.load(counts_ptr + chunk * BUCKETS + offs_b)
        total, before = _sum_counts(counts_ptr, chunk, C, BUCKETS, 8)
    else:
        own, total, before = _count_all(
            reps_ptr, argmax_ptr, active_ptr, chunk, C, begin, shift, V, CHUNK, BUCKETS, ACTIVATION
        )
    stops = tl.cumsum(total, 0)
    if chunk == 0:
        further = tl.where(shift > 0, 0, tl.maximum(total - 1, 0) // SHARE)
        tl.store(stops_ptr + offs_b, stops)
        tl.store(parts_ptr + offs_b, tl.cumsum(further, 0))
    moves = stops - total + before - tl.cumsum(own, 0) + own
    count = tl.sum(own, 0)
    if count > CHUNK // 8:
        _place(
            grad_ptr, columns_ptr, reps_ptr, argmax_ptr, active_ptr, entries_ptr, moves, count,
            begin, shift, first_v, summed, stride_gv, CHUNK, ACTIVATION,
        )  # fmt: skip
    elif count > 0:
        _place(
            grad_ptr, columns_ptr, reps_ptr, argmax_ptr, active_ptr, entries_ptr, moves, count,
            begin, shift, first_v, summed, stride_gv, CHUNK // 8, ACTIVATION,
        )  # fmt: skip


def plan_token_lists(
    N: int,
    V: int,
    D: int,
    *,
    chunk: int,
    share: int,
    buckets: int,
    workspace: int,
    lent: int = 0,
) -> TokenLists:
    """Lists of at most ``workspace`` bytes, or of one sequence.

    ``lent``: bytes of memory that nobody needs as long as the lists live. They lie there if the
    workspace does not hold those of all sequences, and it more.
    """
    chunk = min(chunk, max(next_power_of_2(V), 16))
    listing = 4 * cdiv(V, chunk) * buckets + 2 * V
    listed = 4 * (V // share) * D
    size = cdiv(8 * buckets + max(listing, listed) + 8 * V, RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    rows = slab_rows(N, size, workspace)
    borrows = (rows < N or rows * size > workspace) and lent > workspace and lent >= size
    if borrows:
        rows = slab_rows(N, size, lent)
    return TokenLists(rows, size, chunk, share, buckets, borrows)


def plan_listing(
    lists: TokenLists,
    V: int,
    first: int,
    last: int,
    summed: int,
    strides: tuple[int, ...],
    *,
    num_warps: int,
    activation: str,
) -> list[Step]:
    """Steps that list the active entries of the sequences ``first : last``: a stable counting sort
    of each sequence's entries by bucket.

    Args:
        lists: those to be filled.
        V: vocabulary.
        first, last: at most ``lists.rows`` sequences.
        summed: rows of the vocabulary that share a column of the upstream gradient.
        strides: of that.
        num_warps: of a program.
        activation: of the forward.
    """
    C = cdiv(V, lists.chunk)
    grid, counted = ((last - first) * C,), C > FEW_CHUNKS
    sizes = (first, V, C, lists.size)
    constants: dict[str, Any] = {
        "CHUNK": lists.chunk,
        "BUCKETS": lists.buckets,
        "ACTIVATION": activation,
        "num_warps": num_warps,
    }
    list_step = plan_step(
        _by_token_kernel, grid, *sizes, summed, *strides,
        SHARE=lists.share, COUNTED=counted, **constants,
    )  # fmt: skip
    if not counted:
        return [list_step]
    return [plan_step(_count_kernel, grid, *sizes, **constants), list_step]
