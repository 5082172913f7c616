"""A linear layer's product on Hopper (compute capability 9.0) with its bias, and GELU, at its end:
specialised warps, in Gluon.

T rows of x, K columns of x and of the weight, N rows of the weight.

A program has every so-manieth tile of the result, 128 rows by 256 columns. One warp copies chunks
of 64 columns of x and of the weight into a ring of buffers (TMA), tile after tile. Two or four
warpgroups multiply (WGMMA), 64 rows by 256 or 128 columns each, and end their part of a tile in
their registers: while one does, another multiplies. The ring, its barriers and what holds of them
are those of segment_max/hopper.py. A part leaves in pieces through two small buffers (stmatrix,
TMA), one of which is filled while the other is emptied.

CUDA's library takes longer with a bias than without, and longer still with GELU, which it has in
its tanh form alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparton.kernels.launch import Launch, cdiv, fits_descriptor, multiprocessors
from sparton.kernels.tiles import Descriptor, copy_in, copy_out, halves, rows_layout

ROWS, COLUMNS, CHUNK = 128, 256, 64  # of a tile, and columns of x that are multiplied at once
STAGES = 4
WAVES = 8  # tiles of a multiprocessor, at least
PIECES, BUFFERS = tl.constexpr(4), tl.constexpr(2)  # of a warpgroup's part of a tile
# Warpgroups side by side in a tile. GELU takes longer than a ring of four stages lets another
# warpgroup run ahead: four of half the columns overlap better. (More stages do not fit.)
WITH_BIAS, WITH_GELU = 1, 2


@triton.jit
def _tanh(x):
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _gelu(u):
    """Within 2.5e-5 of GELU, and the hardware's tanh: a polynomial, fitted to the least largest
    error, inside the tanh, which is 1 from 6 on."""
    square = tl.minimum(u * u, 36.0)
    inner = u * (0.797506586 + square * (0.0370068271 - 0.000351708638 * square))
    half = 0.5 * u
    return half + half * _tanh(inner)


@gluon.jit
def _produce(x, weight, tiles, ring, CHUNKS: gl.constexpr, SIDE: gl.constexpr):
    """Copy the next chunk of all warpgroups' rows and columns as a stage falls empty."""
    x_ring, w_ring, full, empty = ring
    across, number = tiles
    DEPTH: gl.constexpr = full.shape[0]
    BLOCK_T: gl.constexpr = x.block_type.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    step = 0
    for tile in range(gl.program_id(0), number, gl.num_programs(0)):
        t, n = tile // across * (2 * BLOCK_T), tile % across * (SIDE * BLOCK_N)
        for chunk in range(CHUNKS):
            stage = step % DEPTH
            mbarrier.wait(empty.index(stage), (step // DEPTH & 1) ^ 1)
            bar = full.index(stage)
            nbytes: gl.constexpr = 2 * x.block_type.nbytes + SIDE * weight.block_type.nbytes
            mbarrier.expect(bar, nbytes)
            for part in gl.static_range(2):
                rows = x_ring.index(part * DEPTH + stage)
                copy_in(x, [t + part * BLOCK_T, chunk * BLOCK_K], bar, rows)
            for part in gl.static_range(SIDE):
                columns = w_ring.index(part * DEPTH + stage)
                copy_in(weight, [n + part * BLOCK_N, chunk * BLOCK_K], bar, columns)
            step += 1


@gluon.jit
def _leave(x, target, place, buffer):
    """Store a piece through a buffer, which the piece before the last has left."""
    tma.store_wait(BUFFERS - 1)
    buffer.store(x.to(target.dtype))
    fence_async_shared()
    copy_out(target, place, buffer)


@gluon.jit
def _end(
    x, place, given,
    PART: gl.constexpr, PIECE: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Bias and GELU of a piece, and where it is wanted the product before both."""
    outputs, bias_ptr, N, _, _, staging = given
    out, product = outputs
    LAYOUT: gl.constexpr = x.type.layout
    columns = place[1] + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    # N is a multiple of 8; told so, the compiler reads two columns at a time.
    bias = gl.load(bias_ptr + columns, columns < N // 8 * 8, 0.0).to(gl.float32)
    u = x + bias[None, :]
    if GELU:
        u = _gelu(u)
    if product is None:
        _leave(u, out, place, staging.index(PART * BUFFERS + PIECE % BUFFERS))
    else:
        _leave(x, product, place, staging.index(PART * BUFFERS))
        _leave(u, out, place, staging.index(PART * BUFFERS + 1))


@gluon.jit
def _consume(
    given,
    PART: gl.constexpr, CHUNKS: gl.constexpr, SIDE: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Multiply and end one part of every tile."""
    _, _, _, tiles, ring, _ = given
    x_ring, w_ring, full, empty = ring
    across, number = tiles
    DEPTH: gl.constexpr = full.shape[0]
    BLOCK_T: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    ROW: gl.constexpr = PART // SIDE
    COLUMN: gl.constexpr = PART % SIDE
    WIDTH: gl.constexpr = BLOCK_N // PIECES
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros((BLOCK_T, BLOCK_N), gl.float32, TILE)
    step = 0
    for tile in range(gl.program_id(0), number, gl.num_programs(0)):
        for chunk in range(CHUNKS):
            stage = (step + chunk) % DEPTH
            mbarrier.wait(full.index(stage), (step + chunk) // DEPTH & 1)
            rows = x_ring.index(ROW * DEPTH + stage)
            columns = w_ring.index(COLUMN * DEPTH + stage).permute((1, 0))
            acc = warpgroup_mma(rows, columns, acc, use_acc=chunk > 0, is_async=True)
            # One product in flight: the one before has read its stage.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + chunk + DEPTH - 1) % DEPTH), pred=chunk > 0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + CHUNKS - 1) % DEPTH))
        step += CHUNKS
        t = (tile // across * 2 + ROW) * BLOCK_T
        n = (tile % across * SIDE + COLUMN) * BLOCK_N
        left, right = halves(acc)
        first, second = halves(left)
        third, fourth = halves(right)
        _end(first, [t, n], given, PART, 0, GELU)
        _end(second, [t, n + WIDTH], given, PART, 1, GELU)
        _end(third, [t, n + 2 * WIDTH], given, PART, 2, GELU)
        _end(fourth, [t, n + 3 * WIDTH], given, PART, 3, GELU)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "across", "number"])
def _linear_hopper_kernel(
    x, weight, bias_ptr, out, product, N, across, number,
    CHUNKS: gl.constexpr, DEPTH: gl.constexpr, SIDE: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """SIDE warpgroups side by side, two above each other; ``number`` tiles, ``across`` in a row."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x_box: gl.constexpr = x.block_type.shape
    w_box: gl.constexpr = weight.block_type.shape
    out_box: gl.constexpr = out.block_type.shape
    x_ring = gl.allocate_shared_memory(x.dtype, [2 * DEPTH, x_box[0], x_box[1]], x.layout)
    w_ring = gl.allocate_shared_memory(
        weight.dtype, [SIDE * DEPTH, w_box[0], w_box[1]], weight.layout
    )
    staging = gl.allocate_shared_memory(
        out.dtype, [2 * SIDE * BUFFERS, out_box[0], out_box[1]], out.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], BARRIER)
    for stage in gl.static_range(DEPTH):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2 * SIDE)
    fence_async_shared()
    ring, tiles, outputs = (x_ring, w_ring, full, empty), (across, number), (out, product)
    given = (outputs, bias_ptr, N, tiles, ring, staging)
    if SIDE == 1:
        gl.warp_specialize(
            [
                (_consume, (given, gl.constexpr(0), CHUNKS, SIDE, GELU)),
                (_consume, (given, gl.constexpr(1), CHUNKS, SIDE, GELU)),
                (_produce, (x, weight, tiles, ring, CHUNKS, SIDE)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(SIDE == 2)
        gl.warp_specialize(
            [
                (_consume, (given, gl.constexpr(0), CHUNKS, SIDE, GELU)),
                (_consume, (given, gl.constexpr(1), CHUNKS, SIDE, GELU)),
                (_consume, (given, gl.constexpr(2), CHUNKS, SIDE, GELU)),
                (_consume, (given, gl.constexpr(3), CHUNKS, SIDE, GELU)),
                (_produce, (x, weight, tiles, ring, CHUNKS, SIDE)),
            ],
            [4, 4, 4, 1],
            [120, 120, 120, 24],
        )


def hopper_linear(
    x: Tensor, weight: Tensor, bias: Tensor, *, gelu: bool = False, save: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``x weight^T + bias``, or GELU of it, and if ``save`` the product alone, both in the dtype of
    x: summed in fp32 and rounded once.

    Args:
        x, weight: ``[T, K]`` and ``[N, K]`` in 16 bits, contiguous, not empty, from an address that
            16 divides on; K and N are multiples of 8.
        bias: ``[N]``, contiguous, of any float dtype.
    """
    (T, K), N = x.shape, len(weight)
    side = WITH_GELU if gelu else WITH_BIAS
    out = torch.empty((T, N), dtype=x.dtype, device=x.device)
    product = torch.empty_like(out) if save else None
    across, down = cdiv(N, COLUMNS), cdiv(T, ROWS)
    width = COLUMNS // side // PIECES.value

    def leaving(target: Tensor) -> Descriptor:
        layout = rows_layout(16, 2 * width)
        return Descriptor(target, (T, N), (N, 1), [ROWS // 2, width], layout)

    Launch(
        _linear_hopper_kernel, (min(multiprocessors(x.device), across * down),),
        N, across, across * down,
        CHUNKS=cdiv(K, CHUNK), DEPTH=STAGES, SIDE=side, GELU=gelu, num_warps=4,
    )(
        Descriptor(x, (T, K), (K, 1), [ROWS // 2, CHUNK], rows_layout(16)),
        Descriptor(weight, (N, K), (K, 1), [COLUMNS // side, CHUNK], rows_layout(16)),
        bias, leaving(out), None if product is None else leaving(product),
    )  # fmt: skip
    return out, product


def suits_hopper(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`hopper_linear` takes these operands, and there are tiles enough for all
    multiprocessors: with fewer, the last ones leave most of these idle, and CUDA's library has
    smaller ones."""
    in_halves = x.dtype == weight.dtype and x.dtype.itemsize == 2
    contiguous = x.is_contiguous() and weight.is_contiguous()
    if not (in_halves and contiguous and len(weight) % 8 == 0):
        return False
    tiles = cdiv(len(x), ROWS) * cdiv(len(weight), COLUMNS)
    enough = tiles >= WAVES * multiprocessors(x.device)
    return enough and fits_descriptor(x) and fits_descriptor(weight)
