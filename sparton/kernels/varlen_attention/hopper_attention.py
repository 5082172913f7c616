"""Forward on Hopper (compute capability 9.0), where queries see all keys: specialised warps, in
Gluon.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.

A problem is one head of one sequence; a program has every so-manieth. One warp copies (TMA) its
queries, keys and values, 64 rows at a time, into rings of buffers. Warpgroups take the tiles of
queries in turn, whichever problem they are of, and go over the chunks of its keys: while one weighs
scores in its registers, another multiplies (WGMMA). A chunk stays until all warpgroups are done
with it, so a problem's keys are read once, where programs of a tile each read them anew.

Tiles end where tiles end, not where sequences do: the rows behind a sequence are its neighbour's.
Their scores count for nothing, and their results are not written. But what is multiplied with
nothing must be finite: where it is not, a sequence spoils the one before it, too.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparton.kernels.launch import Launch, cdiv, multiprocessors
from sparton.kernels.tiles import Descriptor, copy_in, rows_layout
from sparton.kernels.varlen_attention.operands import AttentionOperands
from sparton.kernels.varlen_attention.tiles import LOG2_E

TILE = gl.constexpr(64)  # queries of a tile and keys of a chunk
WARPGROUPS = gl.constexpr(3)  # that multiply
# Tiles in the ring of queries, for each warpgroup: so a stage is always the same one's, and none
# takes a round of its barrier for another. Chunks in the rings of keys and values: a problem has at
# most so many.
QUERIES_EACH, MOST_CHUNKS = 2, 8
BLOCK = 1024  # sequences whose lengths a program looks at
WIDTH = 64  # of a head: with half of it, it gains little
SHORT = 128  # keys, to which a sequence is short
WAVES = 16  # problems of a multiprocessor, at least


class Shape(NamedTuple):
    """What the warps are compiled for.

    Attributes:
        H, D: heads, and the width of one.
        SCALE: of the scores, which are exponents of 2.
    """

    H: gl.constexpr
    D: gl.constexpr
    SCALE: gl.constexpr


@gluon.jit
def _bounds(query_cu_ptr, key_cu_ptr, problem, number, H: gl.constexpr):
    """First token and number of tokens of a problem's sequence, among queries and among keys; those
    of the last where there are no more."""
    n = gl.minimum(problem, number - 1) // H
    first_q, first_k = gl.load(query_cu_ptr + n), gl.load(key_cu_ptr + n)
    num_q, num_k = gl.load(query_cu_ptr + n + 1) - first_q, gl.load(key_cu_ptr + n + 1) - first_k
    return first_q, num_q, first_k, num_k


@gluon.jit
def _produce(query, key, value, strides, problems, rings, SHAPE: gl.constexpr):
    """Copy queries, keys and values of problem after problem, as stages fall empty."""
    query_cu_ptr, key_cu_ptr, number = problems
    q_ring, q_full, q_empty = rings[0]
    k_ring, v_ring, full, empty = rings[1]
    QUERIES: gl.constexpr = q_full.shape[0]
    KEYS: gl.constexpr = full.shape[0]
    q_step = 0
    k_step = 0
    start = gl.program_id(0)
    bounds = _bounds(query_cu_ptr, key_cu_ptr, start, number, SHAPE.H)
    for problem in range(start, number, gl.num_programs(0)):
        first_q, num_q, first_k, num_k = bounds
        following = problem + gl.num_programs(0)
        bounds = _bounds(query_cu_ptr, key_cu_ptr, following, number, SHAPE.H)
        head = problem % SHAPE.H
        tiles, chunks = gl.cdiv(num_q, TILE), gl.maximum(gl.cdiv(num_k, TILE), 1)
        # What is waited for first comes first: queries, then keys, then other queries.
        for part in range(gl.maximum(tiles, 1) + chunks):
            if part == 0 or part > chunks:
                tile = gl.maximum(part - chunks, 0)
                if tile < tiles:
                    stage = q_step % QUERIES
                    # Empty: what lay in the stage a round ago has been read. In round 0 nothing
                    # does, and a barrier of which no phase is complete lets a wait for the phase
                    # before pass.
                    mbarrier.wait(q_empty.index(stage), (q_step // QUERIES & 1) ^ 1)
                    bar = q_full.index(stage)
                    mbarrier.expect(bar, query.block_type.nbytes)
                    at = [first_q + tile * TILE, head * strides[0]]
                    copy_in(query, at, bar, q_ring.index(stage))
                    q_step += 1
            else:
                stage = k_step % KEYS
                mbarrier.wait(empty.index(stage), (k_step // KEYS & 1) ^ 1)
                bar = full.index(stage)
                mbarrier.expect(bar, key.block_type.nbytes + value.block_type.nbytes)
                row = first_k + (part - 1) * TILE
                copy_in(key, [row, head * strides[1]], bar, k_ring.index(stage))
                copy_in(value, [row, head * strides[2]], bar, v_ring.index(stage))
                k_step += 1


@gluon.jit
def _weigh(scores, best, total, SCALE: gl.constexpr):
    """Exponentials of a chunk's scores, the largest score of each query and the sum of its
    exponentials with them, and by how much what came before counts less."""
    new = gl.maximum(best, gl.max(scores, 1) * SCALE)
    shrink = gl.exp2(best - new)
    p = gl.exp2(scores * SCALE - new[:, None])
    return p, new, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _mix(p, v, acc, shrink):
    """Begin to add the values of a chunk to those before it."""
    TILE_LAYOUT: gl.constexpr = acc.type.layout
    weights: gl.constexpr = gl.DotOperandLayout(0, TILE_LAYOUT, 2)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, TILE_LAYOUT))[:, None]
    return warpgroup_mma(gl.convert_layout(p.to(v.dtype), weights), v, acc, is_async=True)


@gluon.jit
def _scores(q, k_ring, full, step, none, ASYNC: gl.constexpr):
    """Begin to multiply the queries with a chunk of keys, when it is there."""
    KEYS: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(step % KEYS), step // KEYS & 1)
    k = k_ring.index(step % KEYS).permute((1, 0))
    return warpgroup_mma(q, k, none, use_acc=False, is_async=ASYNC)


@gluon.jit
def _attend(q, released, keys, first, num_k, last_tile, SHAPE: gl.constexpr):
    """Mixed values of a tile of queries, their largest scores, and the sums of exponentials.
    ``released`` is where to say that the queries have been read; keys, of which step ``first`` is
    the problem's first, are given back if this is the warpgroup's ``last_tile`` of the problem."""
    k_ring, v_ring, full, empty = keys
    KEYS: gl.constexpr = full.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.D, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    # Finite, in case there are no keys.
    best = gl.full((TILE,), -1e30, gl.float32, ROWS)
    total = gl.zeros((TILE,), gl.float32, ROWS)
    none = gl.zeros((TILE, TILE), gl.float32, SCORES)
    acc = gl.zeros((TILE, SHAPE.D), gl.float32, MIXED)
    last = first + gl.maximum(gl.cdiv(num_k, TILE), 1) - 1
    scores = _scores(q, k_ring, full, first, none, False)
    for step in range(first, last):
        # The next scores come while these are weighed. (Products in flight do not outlive a turn
        # of the loop: the compiler would let none run behind another.)
        coming = _scores(q, k_ring, full, step + 1, none, True)
        p, best, total, shrink = _weigh(scores, best, total, SHAPE.SCALE)
        mixed = _mix(p, v_ring.index(step % KEYS), acc, shrink)
        scores, acc = warpgroup_mma_wait(0, deps=(coming, mixed))
        mbarrier.arrive(empty.index(step % KEYS), pred=last_tile)
    mbarrier.arrive(released)
    offs = (last - first) * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    scores = gl.where((offs < num_k)[None, :], scores, float("-inf"))
    p, best, total, shrink = _weigh(scores, best, total, SHAPE.SCALE)
    mixed = _mix(p, v_ring.index(last % KEYS), acc, shrink)
    acc = warpgroup_mma_wait(0, deps=(mixed,))
    mbarrier.arrive(empty.index(last % KEYS), pred=last_tile)
    return acc, best, total


@gluon.jit
def _leave(acc, best, total, out_ptr, lse_ptr, row, count, head, Tq, SHAPE: gl.constexpr):
    """Write the first ``count`` rows of a tile that begins at ``row``."""
    VECTOR: gl.constexpr = 8  # elements, 16 bytes
    LANES: gl.constexpr = SHAPE.D // VECTOR
    WRITTEN: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [4, 1], [1, 0])
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc.type.layout))
    mixed = gl.convert_layout((acc * inverse[:, None]).to(out_ptr.dtype.element_ty), WRITTEN)
    offs = gl.arange(0, TILE, gl.SliceLayout(1, WRITTEN))
    columns = gl.arange(0, SHAPE.D, gl.SliceLayout(0, WRITTEN))
    rows = (row + offs).to(gl.int64) * (SHAPE.H * SHAPE.D) + head * SHAPE.D
    gl.store(out_ptr + rows[:, None] + columns[None, :], mixed, (offs < count)[:, None])
    if lse_ptr is not None:
        offs = gl.arange(0, TILE, total.type.layout)
        lse_ptr += head.to(gl.int64) * Tq + row
        gl.store(lse_ptr + offs, best + gl.log2(total), offs < count)


@gluon.jit
def _consume(out_ptr, lse_ptr, Tq, problems, rings, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Every so-manieth tile of queries, of whichever problem."""
    query_cu_ptr, key_cu_ptr, number = problems
    q_ring, q_full, q_empty = rings[0]
    full, empty = rings[1][2], rings[1][3]
    QUERIES: gl.constexpr = q_full.shape[0]
    KEYS: gl.constexpr = full.shape[0]
    q_step = 0
    k_step = 0
    start = gl.program_id(0)
    bounds = _bounds(query_cu_ptr, key_cu_ptr, start, number, SHAPE.H)
    for problem in range(start, number, gl.num_programs(0)):
        first_q, num_q, num_k = bounds[0], bounds[1], bounds[3]
        following = problem + gl.num_programs(0)
        bounds = _bounds(query_cu_ptr, key_cu_ptr, following, number, SHAPE.H)
        head = problem % SHAPE.H
        tiles, chunks = gl.cdiv(num_q, TILE), gl.maximum(gl.cdiv(num_k, TILE), 1)
        own = (PART + WARPGROUPS - q_step % WARPGROUPS) % WARPGROUPS
        for tile in range(own, tiles, WARPGROUPS):
            stage = (q_step + tile) % QUERIES
            mbarrier.wait(q_full.index(stage), (q_step + tile) // QUERIES & 1)
            q, released = q_ring.index(stage), q_empty.index(stage)
            last_tile = tile + WARPGROUPS >= tiles
            acc, best, total = _attend(q, released, rings[1], k_step, num_k, last_tile, SHAPE)
            if num_k == 0:
                best = best * 0.0
                total = best + 1.0
            row, count = first_q + tile * TILE, num_q - tile * TILE
            _leave(acc, best, total, out_ptr, lse_ptr, row, count, head, Tq, SHAPE)
        if own >= tiles:
            # It waits too: none says twice that it is done with a stage before all have said it.
            for step in range(k_step, k_step + chunks):
                mbarrier.wait(full.index(step % KEYS), step // KEYS & 1)
                mbarrier.arrive(empty.index(step % KEYS))
        q_step += tiles
        k_step += chunks


@gluon.jit(do_not_specialize=["stride_q", "stride_k", "stride_v", "number", "Tq"])
def _attention_hopper_kernel(
    query, key, value, query_cu_ptr, key_cu_ptr, out_ptr, lse_ptr,
    stride_q, stride_k, stride_v, number, Tq,
    SCALE: gl.constexpr, H: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """``number`` problems; strides are those of heads. QUERIES tiles of these fit into their ring,
    and KEYS chunks of keys and of values into theirs."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_ring = gl.allocate_shared_memory(query.dtype, [QUERIES, TILE, D], query.layout)
    k_ring = gl.allocate_shared_memory(key.dtype, [KEYS, TILE, D], key.layout)
    v_ring = gl.allocate_shared_memory(value.dtype, [KEYS, TILE, D], value.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [KEYS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [KEYS, 1], BARRIER)
    for stage in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=1)
    for stage in gl.static_range(KEYS):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=WARPGROUPS)
    fence_async_shared()
    SHAPE: gl.constexpr = Shape(H, D, SCALE * LOG2_E)
    rings = ((q_ring, q_full, q_empty), (k_ring, v_ring, full, empty))
    problems = (query_cu_ptr, key_cu_ptr, number)
    strides = (stride_q, stride_k, stride_v)
    gl.warp_specialize(
        [
            (_consume, (out_ptr, lse_ptr, Tq, problems, rings, gl.constexpr(0), SHAPE)),
            (_consume, (out_ptr, lse_ptr, Tq, problems, rings, gl.constexpr(1), SHAPE)),
            (_consume, (out_ptr, lse_ptr, Tq, problems, rings, gl.constexpr(2), SHAPE)),
            (_produce, (query, key, value, strides, problems, rings, SHAPE)),
        ],
        [4, 4, 1],
        [152, 152, 40],
    )


# `debug` keeps the assertions; overflows are not looked for. In the kernel itself they would be
# calls, for the sake of which the compiler lets no product run behind another.
@triton.jit(debug=True, do_not_specialize=["N", "max_query", "max_key"])
def _assert_lengths_kernel(query_cu_ptr, key_cu_ptr, N, max_query, max_key, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    queries = tl.load(query_cu_ptr + n + 1, n < N, 0) - tl.load(query_cu_ptr + n, n < N, 0)
    keys = tl.load(key_cu_ptr + n + 1, n < N, 0) - tl.load(key_cu_ptr + n, n < N, 0)
    tl.device_assert(queries <= max_query, "a sequence has more queries than max_query")
    tl.device_assert(keys <= max_key, "a sequence has more keys than max_key")


def attention_hopper(operands: AttentionOperands, out: Tensor, lse: Tensor | None) -> None:
    """Fill ``out [Tq, H, d]`` and, where it is wanted, ``lse [H, Tq]``, as
    :func:`~sparton.kernels.varlen_attention.forward.varlen_attention_forward` says."""
    tensors, bounds = operands[:3], operands[3:5]
    _, H, d = out.shape
    N = len(bounds[0]) - 1
    Launch(
        _assert_lengths_kernel, (cdiv(N, BLOCK),), N, operands.max_query, operands.max_key,
        BLOCK=BLOCK, sanitize_overflow=False, num_warps=4,
    )(*bounds)  # fmt: skip
    box, layout = [TILE.value, d], rows_layout(16, 2 * d)

    def rows(x: Tensor) -> Descriptor:
        along, across = x.stride()[:2]
        return Descriptor(x, (len(x), (H - 1) * across + d), (along, 1), box, layout)

    Launch(
        _attention_hopper_kernel, (min(multiprocessors(out.device), operands.num_problems),),
        *(x.stride(1) for x in tensors), operands.num_problems, len(out), SCALE=operands.scale,
        H=H, D=d, QUERIES=QUERIES_EACH * WARPGROUPS.value, KEYS=MOST_CHUNKS, num_warps=4,
    )(*map(rows, tensors), *bounds, out, lse)  # fmt: skip


def suits_hopper(operands: AttentionOperands) -> bool:
    """Whether :func:`attention_hopper` takes these operands, and there is work enough: short
    sequences are done as soon by programs of a tile each, and of few problems its descriptors take
    the host longer than the device needs."""
    tensors = operands[:3]
    enough = WAVES * multiprocessors(operands.query.device)
    return (
        operands.window < 0
        and SHORT < operands.max_key <= TILE.value * MOST_CHUNKS
        and operands.num_problems >= enough
        and operands.query.shape[2] == WIDTH
        and all(len(x) and x.data_ptr() % 16 == 0 for x in tensors)
        and all(stride % 8 == 0 for x in tensors for stride in x.stride()[:2])
    )
