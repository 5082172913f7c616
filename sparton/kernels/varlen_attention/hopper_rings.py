"""What the kernels for Hopper (compute capability 9.0) share: specialised warps that go over packed
sequences in tiles and chunks, in Gluon.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.

A problem is one head of one sequence. A kernel cuts its one side, queries or keys, into tiles of 64
rows, whose results it makes, and goes over the other side in chunks of 64 rows. Of either it reads
several tensors. One warp copies them (TMA) into rings of buffers. Warpgroups take the tiles in
turn, whichever sequence they are of, and multiply them with chunk after chunk (WGMMA). A chunk
stays until all warpgroups are done with it, so that it is read once, where programs of a tile each
read it anew.

A program has one head of consecutive sequences, see shares.py.

Tiles end where tiles end, not where sequences do: the rows behind a sequence are its neighbour's.
They count for nothing, and their results are not written. But what is multiplied with nothing must
be finite: where it is not, a sequence spoils the one before it, too.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparton.kernels.launch import multiprocessors
from sparton.kernels.tiles import Descriptor, copy_in, rows_layout
from sparton.kernels.varlen_attention.operands import AttentionOperands

TILE = gl.constexpr(64)  # rows of a tile and of a chunk
MOST_CHUNKS = 8  # of a sequence, and so many fit into the ring
WIDTH = 64  # of a head: with half of it, specialised warps gain little
SHORT = 128  # keys, to which a sequence is short
WAVES = 8  # problems of a multiprocessor, at least


@gluon.constexpr_function
def product(columns: int) -> gl.NVMMADistributedLayout:
    """How a warpgroup holds the product of a tile with so many columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def lines(columns: int) -> gl.BlockedLayout:
    """How a warpgroup reads and writes rows of so many elements, 16 bytes a thread."""
    lanes = columns // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


class Shape(NamedTuple):
    """What the warps are compiled for.

    Attributes:
        H, D: heads, and the width of one.
        SCALE: of the scores.
        PARTS: warpgroups that multiply.
    """

    H: gl.constexpr
    D: gl.constexpr
    SCALE: gl.constexpr
    PARTS: gl.constexpr


class Share(NamedTuple):
    """What a program does: ``head`` of the sequences ``begin`` to ``end`` among N, whose boundaries
    are those of tiles and of chunks."""

    tile_cu_ptr: Any
    chunk_cu_ptr: Any
    begin: Any
    end: Any
    head: Any
    N: Any


class Operand(NamedTuple):
    """What a ring is filled with: descriptors of tensors ``[T, H, d]`` and the strides of their
    heads, and None or that of sums of the tokens, two for each head."""

    tensors: Any
    strides: Any
    sums: Any


class Ring(NamedTuple):
    """Stages: a buffer of each tensor, and the barriers that say that all of them have come, and
    that all have been read."""

    buffers: Any
    full: Any
    empty: Any


class Place(NamedTuple):
    """Where a tile lies: its first row, also among sums, rows of its sequence from there on, rows
    of the other side, and the head."""

    row: Any
    sums_row: Any
    count: Any
    others: Any
    head: Any


@gluon.jit
def _aligned(first, n):
    """Where sums of sequence ``n`` begin: TMA reads whole 16 bytes, four of them."""
    return (first + 3 * n) // 4 * 4


@gluon.jit
def _stages(x, DEPTH: gl.constexpr):
    ROWS: gl.constexpr = x.block_type.shape[0]
    COLUMNS: gl.constexpr = x.block_type.shape[1]
    return gl.allocate_shared_memory(x.dtype, [DEPTH, ROWS, COLUMNS], x.layout)


@gluon.jit
def _make_ring(operand, DEPTH: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring for what the operand describes."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], BARRIER)
    for stage in gl.static_range(DEPTH):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    buffers = ()
    for i in gl.static_range(len(operand.tensors)):
        buffers += (_stages(operand.tensors[i], DEPTH),)  # type: ignore[assignment]
    if operand.sums is not None:
        buffers += (_stages(operand.sums, DEPTH),)  # type: ignore[assignment]
    return Ring(buffers, full, empty)


@gluon.jit
def buffer(ring, which: gl.constexpr, step):
    """One tensor's rows in the stage of this step."""
    DEPTH: gl.constexpr = ring.full.shape[0]
    return ring.buffers[which].index(step % DEPTH)


@gluon.jit
def await_stage(ring, step):
    """Wait until what belongs into the stage of this step has come."""
    DEPTH: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(step % DEPTH), step // DEPTH & 1)


@gluon.jit
def give_back(ring, step, pred):
    """Say that the stage of this step has been read, if ``pred``."""
    DEPTH: gl.constexpr = ring.empty.shape[0]
    mbarrier.arrive(ring.empty.index(step % DEPTH), pred=pred)


@gluon.jit
def _copy(operand, row, sums_row, head, ring, step):
    """Begin to copy 64 rows into the stage of this step, when it is empty."""
    DEPTH: gl.constexpr = ring.full.shape[0]
    NBYTES: gl.constexpr = len(operand.tensors) * operand.tensors[0].block_type.nbytes
    # Empty: what lay in the stage a round ago has been read. In round 0 nothing does, and a barrier
    # of which no phase is complete lets a wait for the phase before pass.
    mbarrier.wait(ring.empty.index(step % DEPTH), (step // DEPTH & 1) ^ 1)
    bar = ring.full.index(step % DEPTH)
    if operand.sums is None:
        mbarrier.expect(bar, NBYTES)
    else:
        mbarrier.expect(bar, NBYTES + operand.sums.block_type.nbytes)
        copy_in(operand.sums, [2 * head, sums_row], bar, buffer(ring, len(operand.tensors), step))
    for i in gl.static_range(len(operand.tensors)):
        copy_in(operand.tensors[i], [row, head * operand.strides[i]], bar, buffer(ring, i, step))


@gluon.jit
def _end(share, n):
    """Where sequence ``n`` ends, among tiles and among chunks; the last where there are no more."""
    n = gl.minimum(n + 1, share.N)
    return gl.load(share.tile_cu_ptr + n), gl.load(share.chunk_cu_ptr + n)


@gluon.jit
def _produce(share, tiled, chunked, tiles, chunks):
    """Copy tiles and chunks of sequence after sequence into their rings, as stages fall empty."""
    tile_step = 0
    chunk_step = 0
    first, end = _end(share, share.begin - 1), _end(share, share.begin)
    for n in range(share.begin, share.end):
        next_end = _end(share, n + 1)
        num_tiles = gl.cdiv(end[0] - first[0], TILE)
        num_chunks = gl.maximum(gl.cdiv(end[1] - first[1], TILE), 1)
        # What is waited for first comes first: a tile, then chunks, then other tiles.
        for part in range(gl.maximum(num_tiles, 1) + num_chunks):
            if part == 0 or part > num_chunks:
                tile = gl.maximum(part - num_chunks, 0)
                if tile < num_tiles:
                    _copy(tiled, first[0] + tile * TILE, 0, share.head, tiles, tile_step)
                    tile_step += 1
            else:
                done = (part - 1) * TILE
                sums_row = _aligned(first[1], n) + done
                _copy(chunked, first[1] + done, sums_row, share.head, chunks, chunk_step)
                chunk_step += 1
        first = end
        end = next_end


@gluon.jit
def _consume(work, share, results, tiles, chunks, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Every so-manieth tile, of whichever sequence: ``work`` makes and writes the results of one.

    It gives the tile back, and the chunks if told that the tile is this warpgroup's last of the
    sequence."""
    tile_step = 0
    chunk_step = 0
    first, end = _end(share, share.begin - 1), _end(share, share.begin)
    for n in range(share.begin, share.end):
        next_end = _end(share, n + 1)
        count, others = end[0] - first[0], end[1] - first[1]
        num_tiles, num_chunks = gl.cdiv(count, TILE), gl.maximum(gl.cdiv(others, TILE), 1)
        own = (PART + SHAPE.PARTS - tile_step % SHAPE.PARTS) % SHAPE.PARTS
        for tile in range(own, num_tiles, SHAPE.PARTS):
            done = tile * TILE
            sums_row = _aligned(first[0], n) + done
            place = Place(first[0] + done, sums_row, count - done, others, share.head)
            last_tile = tile + SHAPE.PARTS >= num_tiles
            work(results, place, tiles, tile_step + tile, chunks, chunk_step, last_tile, SHAPE)
        if own >= num_tiles:
            # It waits too: none says twice that it is done with a stage before all have said it.
            for step in range(chunk_step, chunk_step + num_chunks):
                await_stage(chunks, step)
                give_back(chunks, step, True)
        tile_step += num_tiles
        chunk_step += num_chunks
        first = end
        end = next_end


@gluon.jit
def _own_share(bounds, H: gl.constexpr):
    """What this program does."""
    tile_cu_ptr, chunk_cu_ptr, shares_ptr, N = bounds
    group = gl.program_id(0) // H
    begin, end = gl.load(shares_ptr + group), gl.load(shares_ptr + group + 1)
    return Share(tile_cu_ptr, chunk_cu_ptr, begin, end, gl.program_id(0) % H, N)


@gluon.jit
def specialise(
    work: gl.constexpr, bounds, results, tiled, chunked, TILES: gl.constexpr,
    CHUNKS: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Rings for so many tiles and chunks, and the warps.

    ``bounds`` are the boundaries of tiles and of chunks, what share_out has given, and N. Who works
    gets the registers that are left."""
    tiles = _make_ring(tiled, TILES, 1)
    chunks = _make_ring(chunked, CHUNKS, SHAPE.PARTS)
    fence_async_shared()
    share = _own_share(bounds, SHAPE.H)
    if SHAPE.PARTS == 3:
        gl.warp_specialize(
            [
                (_consume, (work, share, results, tiles, chunks, gl.constexpr(0), SHAPE)),
                (_consume, (work, share, results, tiles, chunks, gl.constexpr(1), SHAPE)),
                (_consume, (work, share, results, tiles, chunks, gl.constexpr(2), SHAPE)),
                (_produce, (share, tiled, chunked, tiles, chunks)),
            ],
            [4, 4, 1],
            [152, 152, 40],
        )
    else:
        gl.static_assert(SHAPE.PARTS == 2)
        gl.warp_specialize(
            [
                (_consume, (work, share, results, tiles, chunks, gl.constexpr(0), SHAPE)),
                (_consume, (work, share, results, tiles, chunks, gl.constexpr(1), SHAPE)),
                (_produce, (share, tiled, chunked, tiles, chunks)),
            ],
            [4, 1],
            [232, 40],
        )


@gluon.jit
def write_rows(tile, x_ptr, stride_t, place, D: gl.constexpr):
    """Write those rows of a tile that are its sequence's, where heads lie side by side."""
    WRITTEN: gl.constexpr = lines(D)
    values = gl.convert_layout(tile.to(x_ptr.dtype.element_ty), WRITTEN)
    offs = gl.arange(0, TILE, gl.SliceLayout(1, WRITTEN))
    columns = gl.arange(0, D, gl.SliceLayout(0, WRITTEN))
    rows = (place.row + offs).to(gl.int64) * stride_t + place.head * D
    gl.store(x_ptr + rows[:, None] + columns[None, :], values, (offs < place.count)[:, None])


@gluon.jit
def write_norms(tile, norms_ptr, T, place):
    """Write those of the same rows, one head after the other, if they are asked for."""
    if norms_ptr is not None:
        offs = gl.arange(0, TILE, gl.SliceLayout(1, tile.type.layout))
        norms = gl.sqrt_rn(gl.sum(tile * tile, 1))
        rows = place.head.to(gl.int64) * T + place.row + offs
        gl.store(norms_ptr + rows, norms, offs < place.count)


def rows_of(x: Tensor) -> Descriptor:
    """The descriptor of 64 rows of one head of ``[T, H, d]``."""
    T, H, d = x.shape
    along, across = x.stride()[:2]
    shape, box = (T, (H - 1) * across + d), [TILE.value, d]
    return Descriptor(x, shape, (along, 1), box, rows_layout(16, 2 * d))


def suits_hopper(operands: AttentionOperands, *others: Tensor) -> bool:
    """Whether kernels with these rings take the operands, and other tensors like them, and there is
    work enough: short sequences are done as soon by programs of a tile each, and of few problems
    descriptors take the host longer than the device needs."""
    tensors = (*operands[:3], *others)
    enough = WAVES * multiprocessors(operands.query.device)
    return (
        operands.window < 0
        and SHORT < operands.max_key <= TILE.value * MOST_CHUNKS
        and operands.max_query <= TILE.value * MOST_CHUNKS
        and operands.num_problems >= enough
        and operands.query.shape[2] == WIDTH
        and all(len(x) and x.data_ptr() % 16 == 0 for x in tensors)
        and all(stride > 0 and stride % 8 == 0 for x in tensors for stride in x.stride()[:2])
    )
