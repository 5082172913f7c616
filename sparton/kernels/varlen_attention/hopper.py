"""Forward on Hopper (compute capability 9.0), where queries see all keys: specialised warps, in
Gluon.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.

A problem is one head of one sequence; a program has every so-manieth. One warp copies (TMA) the
keys and values of a problem, all of them, into one of a few places, and its queries, 64 at a time,
into a ring. Warpgroups take these tiles of queries in turn, whichever problem they are of, and go
over the keys in chunks of 64: while one weighs a chunk's scores in its registers, another
multiplies (WGMMA). So a problem's keys are read once, where programs of a tile each read them anew.

Tiles end where tiles end, not where sequences do: the rows behind a sequence are its neighbour's.
Their scores count for nothing, and their results are not written.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparton.kernels.launch import Launch, cdiv, multiprocessors, next_power_of_2
from sparton.kernels.tiles import Descriptor, copy_in, rows_layout
from sparton.kernels.varlen_attention.operands import AttentionOperands
from sparton.kernels.varlen_attention.tiles import LOG2_E

TILE = gl.constexpr(64)  # queries of a tile and keys of a chunk
CHUNKS = 8  # for which there are buffers; a problem has at most so many
QUERIES = 4  # tiles of queries in their ring
WARPGROUPS = 3
WIDTHS = (32, 64)


class Shape(NamedTuple):
    """What the warps are compiled for.

    Attributes:
        WARPGROUPS: that multiply.
        CHUNKS: of a problem's keys, at most.
        H, D: heads, and the width of one.
        SCALE: of the scores, which are exponents of 2.
    """

    WARPGROUPS: gl.constexpr
    CHUNKS: gl.constexpr
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
def _trap_above(size, most):
    """End the kernel with an error. (An assertion is a call, for the sake of which the compiler
    would let no two products of the whole kernel run behind each other.)"""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $1, $2; @p trap; mov.b32 $0, $1; }",
        "=r,r,r",
        [size, most],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _produce(query, key, value, strides, problems, buffers, most, SHAPE: gl.constexpr):
    """Copy queries, keys and values of problem after problem, as places fall empty."""
    query_cu_ptr, key_cu_ptr, number = problems
    q_ring, k_ring, v_ring, q_full, q_empty, full, empty = buffers
    QUERIES: gl.constexpr = q_ring.shape[0]
    PLACES: gl.constexpr = full.shape[0]
    item = 0
    turn = 0
    start = gl.program_id(0)
    bounds = _bounds(query_cu_ptr, key_cu_ptr, start, number, SHAPE.H)
    for problem in range(start, number, gl.num_programs(0)):
        first_q, num_q, first_k, num_k = bounds
        _trap_above(num_q, most[0])
        _trap_above(num_k, most[1])
        following = problem + gl.num_programs(0)
        bounds = _bounds(query_cu_ptr, key_cu_ptr, following, number, SHAPE.H)
        head = problem % SHAPE.H
        place = turn % PLACES
        # Empty: all warpgroups are done with what lay there. Of the first round nothing does, and
        # a barrier of which no phase is complete lets a wait for the phase before pass.
        mbarrier.wait(empty.index(place), (turn // PLACES & 1) ^ 1)
        bar = full.index(place)
        for tile in range(gl.maximum(gl.cdiv(num_q, TILE), 1)):
            if tile * TILE < num_q:
                stage = item % QUERIES
                mbarrier.wait(q_empty.index(stage), (item // QUERIES & 1) ^ 1)
                arrived = q_full.index(stage)
                mbarrier.expect(arrived, query.block_type.nbytes)
                row = first_q + tile * TILE
                copy_in(query, [row, head * strides[0]], arrived, q_ring.index(stage))
                item += 1
            if tile == 0:
                for chunk in gl.static_range(SHAPE.CHUNKS):
                    # One chunk comes in any case. Those that a problem has not are there at once.
                    exists = chunk * TILE < gl.maximum(num_k, 1)
                    mbarrier.expect(bar, 2 * key.block_type.nbytes, pred=exists)
                    mbarrier.arrive(bar, pred=chunk * TILE >= gl.maximum(num_k, 1))
                    row = first_k + chunk * TILE
                    at = place * SHAPE.CHUNKS + chunk
                    copy_in(key, [row, head * strides[1]], bar, k_ring.index(at), exists)
                    copy_in(value, [row, head * strides[2]], bar, v_ring.index(at), exists)
        turn += 1


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
def _attend(q, kv, released, first, num_k, SHAPE: gl.constexpr):
    """Mixed values of a tile of queries, their largest scores, and the sums of exponentials.
    ``first`` of the chunks in ``kv`` is the problem's; ``released`` is where to say that the
    queries have been read."""
    k_ring, v_ring = kv
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.D, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    # Finite, in case there are no keys.
    best = gl.full((TILE,), -1e30, gl.float32, ROWS)
    total = gl.zeros((TILE,), gl.float32, ROWS)
    none = gl.zeros((TILE, TILE), gl.float32, SCORES)
    acc = gl.zeros((TILE, SHAPE.D), gl.float32, MIXED)
    k = k_ring.index(first).permute((1, 0))
    scores = warpgroup_mma(q, k, none, use_acc=False)
    last = gl.maximum(gl.cdiv(num_k, TILE), 1) - 1
    for chunk in range(last):
        # The next scores come while these are weighed. (Products in flight do not outlive a turn
        # of the loop: the compiler would let none run behind another.)
        k = k_ring.index(first + chunk + 1).permute((1, 0))
        coming = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        p, best, total, shrink = _weigh(scores, best, total, SHAPE.SCALE)
        mixed = _mix(p, v_ring.index(first + chunk), acc, shrink)
        scores, acc = warpgroup_mma_wait(0, deps=(coming, mixed))
    mbarrier.arrive(released)
    keys = last * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    scores = gl.where((keys < num_k)[None, :], scores, float("-inf"))
    p, best, total, shrink = _weigh(scores, best, total, SHAPE.SCALE)
    mixed = _mix(p, v_ring.index(first + last), acc, shrink)
    return warpgroup_mma_wait(0, deps=(mixed,)), best, total


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
def _consume(out_ptr, lse_ptr, Tq, problems, buffers, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Every so-manieth tile of queries, of whichever problem."""
    query_cu_ptr, key_cu_ptr, number = problems
    q_ring, k_ring, v_ring, q_full, q_empty, full, empty = buffers
    QUERIES: gl.constexpr = q_ring.shape[0]
    PLACES: gl.constexpr = full.shape[0]
    item = 0
    turn = 0
    start = gl.program_id(0)
    bounds = _bounds(query_cu_ptr, key_cu_ptr, start, number, SHAPE.H)
    for problem in range(start, number, gl.num_programs(0)):
        first_q, num_q, first_k, num_k = bounds
        following = problem + gl.num_programs(0)
        bounds = _bounds(query_cu_ptr, key_cu_ptr, following, number, SHAPE.H)
        head = problem % SHAPE.H
        place = turn % PLACES
        # Those without a tile of the problem wait too: none says twice that it is done with a
        # place before all have said it once.
        mbarrier.wait(full.index(place), turn // PLACES & 1)
        tiles = gl.cdiv(num_q, TILE)
        own = (PART + SHAPE.WARPGROUPS - item % SHAPE.WARPGROUPS) % SHAPE.WARPGROUPS
        for tile in range(own, tiles, SHAPE.WARPGROUPS):
            stage = (item + tile) % QUERIES
            mbarrier.wait(q_full.index(stage), (item + tile) // QUERIES & 1)
            q, released = q_ring.index(stage), q_empty.index(stage)
            kv, first = (k_ring, v_ring), place * SHAPE.CHUNKS
            acc, best, total = _attend(q, kv, released, first, num_k, SHAPE)
            if num_k == 0:
                best = best * 0.0
                total = best + 1.0
            row, count = first_q + tile * TILE, num_q - tile * TILE
            _leave(acc, best, total, out_ptr, lse_ptr, row, count, head, Tq, SHAPE)
        mbarrier.arrive(empty.index(place))
        item += tiles
        turn += 1


# `debug` keeps the assertions; overflows are not looked for.
@gluon.jit(
    debug=True,
    do_not_specialize=["stride_q", "stride_k", "stride_v", "number", "Tq", "max_query", "max_key"],
)
def _attention_hopper_kernel(
    query, key, value, query_cu_ptr, key_cu_ptr, out_ptr, lse_ptr,
    stride_q, stride_k, stride_v, number, Tq, max_query, max_key,
    SCALE: gl.constexpr, H: gl.constexpr, D: gl.constexpr, CHUNKS: gl.constexpr,
    PLACES: gl.constexpr, QUERIES: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """``number`` problems, the keys of so many at a time in PLACES for CHUNKS of each; strides are
    those of heads."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DEPTH: gl.constexpr = PLACES * CHUNKS
    q_ring = gl.allocate_shared_memory(query.dtype, [QUERIES, TILE, D], query.layout)
    k_ring = gl.allocate_shared_memory(key.dtype, [DEPTH, TILE, D], key.layout)
    v_ring = gl.allocate_shared_memory(value.dtype, [DEPTH, TILE, D], value.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BARRIER)
    for stage in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=1)
    for place in gl.static_range(PLACES):
        mbarrier.init(full.index(place), count=CHUNKS)
        mbarrier.init(empty.index(place), count=WARPGROUPS)
    fence_async_shared()
    SHAPE: gl.constexpr = Shape(WARPGROUPS, CHUNKS, H, D, SCALE * LOG2_E)
    buffers = (q_ring, k_ring, v_ring, q_full, q_empty, full, empty)
    problems = (query_cu_ptr, key_cu_ptr, number)
    strides, most = (stride_q, stride_k, stride_v), (max_query, max_key)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (out_ptr, lse_ptr, Tq, problems, buffers, gl.constexpr(0), SHAPE)),
                (_consume, (out_ptr, lse_ptr, Tq, problems, buffers, gl.constexpr(1), SHAPE)),
                (_produce, (query, key, value, strides, problems, buffers, most, SHAPE)),
            ],
            [4, 1],
            [240, 24],
        )
    elif WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (_consume, (out_ptr, lse_ptr, Tq, problems, buffers, gl.constexpr(0), SHAPE)),
                (_consume, (out_ptr, lse_ptr, Tq, problems, buffers, gl.constexpr(1), SHAPE)),
                (_consume, (out_ptr, lse_ptr, Tq, problems, buffers, gl.constexpr(2), SHAPE)),
                (_produce, (query, key, value, strides, problems, buffers, most, SHAPE)),
            ],
            [4, 4, 1],
            [152, 152, 40],
        )
    else:
        gl.static_assert(WARPGROUPS == 4)
        gl.warp_specialize(
            [
                (_consume, (out_ptr, lse_ptr, Tq, problems, buffers, gl.constexpr(0), SHAPE)),
                (_consume, (out_ptr, lse_ptr, Tq, problems, buffers, gl.constexpr(1), SHAPE)),
                (_consume, (out_ptr, lse_ptr, Tq, problems, buffers, gl.constexpr(2), SHAPE)),
                (_consume, (out_ptr, lse_ptr, Tq, problems, buffers, gl.constexpr(3), SHAPE)),
                (_produce, (query, key, value, strides, problems, buffers, most, SHAPE)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 40],
        )


def attention_hopper(
    operands: AttentionOperands, out: Tensor, lse: Tensor | None, *, warpgroups: int = WARPGROUPS
) -> None:
    """Fill ``out [Tq, H, d]`` and, where it is wanted, ``lse [H, Tq]``, as
    :func:`~sparton.kernels.varlen_attention.forward.varlen_attention_forward` says."""
    tensors = operands[:3]
    _, H, d = out.shape
    chunks = next_power_of_2(cdiv(operands.max_key, TILE.value))
    box, layout = [TILE.value, d], rows_layout(16, 2 * d)

    def rows(x: Tensor) -> Descriptor:
        along, across = x.stride()[:2]
        return Descriptor(x, (len(x), (H - 1) * across + d), (along, 1), box, layout)

    Launch(
        _attention_hopper_kernel, (min(multiprocessors(out.device), operands.num_problems),),
        *(x.stride(1) for x in tensors), operands.num_problems, len(out), operands.max_query,
        operands.max_key, SCALE=operands.scale, H=H, D=d, CHUNKS=chunks, PLACES=CHUNKS // chunks,
        QUERIES=QUERIES, WARPGROUPS=warpgroups, sanitize_overflow=False, num_warps=4,
    )(*map(rows, tensors), *operands[3:5], out, lse)  # fmt: skip


def suits_hopper(operands: AttentionOperands) -> bool:
    """Whether :func:`attention_hopper` takes these operands."""
    longest = TILE.value * CHUNKS
    fits = operands.window < 0 and TILE.value < operands.max_key <= longest
    return (
        fits
        and operands.query.shape[2] in WIDTHS
        and all(len(x) and x.data_ptr() % 16 == 0 for x in operands[:3])
        and all(stride % 8 == 0 for x in operands[:3] for stride in x.stride()[:2])
    )
