"""Forward on Hopper (compute capability 9.0), where queries see all keys: specialised warps, in
Gluon.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.

Tiles are of queries, chunks of keys and values, in the rings of hopper_rings.py. While one
warpgroup weighs scores in its registers, another multiplies.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparton.kernels.launch import Launch
from sparton.kernels.varlen_attention.hopper_rings import (
    MOST_CHUNKS,
    TILE,
    Operand,
    Shape,
    await_stage,
    buffer,
    give_back,
    product,
    rows_of,
    specialise,
    write_rows,
)
from sparton.kernels.varlen_attention.operands import AttentionOperands
from sparton.kernels.varlen_attention.shares import share_out
from sparton.kernels.varlen_attention.tiles import LOG2_E

PARTS = gl.constexpr(3)
# Tiles in their ring, for each warpgroup: so a stage is always the same one's, and none takes a
# round of its barrier for another.
TILES_EACH = 2


@gluon.jit
def _weigh(scores, best, total, SCALE: gl.constexpr):
    """Exponentials of a chunk's scores, the largest score of each query and the sum of its
    exponentials with them, and by how much what came before counts less."""
    new = gl.maximum(best, gl.max(scores, 1) * SCALE)
    shrink = gl.exp2(best - new)
    p = gl.exp2(scores * SCALE - new[:, None])
    return p, new, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _mix(p, values, acc, shrink):
    """Begin to add the values of a chunk to those before it."""
    MIXED: gl.constexpr = acc.type.layout
    weights: gl.constexpr = gl.DotOperandLayout(0, MIXED, 2)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, MIXED))[:, None]
    p = gl.convert_layout(p.to(values.dtype), weights)
    return warpgroup_mma(p, values, acc, is_async=True)


@gluon.jit
def _scores(queries, chunks, step, none, ASYNC: gl.constexpr):
    """Begin to multiply the queries with a chunk of keys, when it is there."""
    await_stage(chunks, step)
    keys = buffer(chunks, 0, step).permute((1, 0))
    return warpgroup_mma(queries, keys, none, use_acc=False, is_async=ASYNC)


@gluon.jit
def _attend(results, place, tiles, tile, chunks, first, last_tile, SHAPE: gl.constexpr):
    """Mixed values of a tile of queries, and the logarithms of their sums of exponentials."""
    out_ptr, lse_ptr, Tq = results
    SCORES: gl.constexpr = product(TILE)
    MIXED: gl.constexpr = product(SHAPE.D)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SCALE: gl.constexpr = SHAPE.SCALE * LOG2_E  # scores are exponents of 2
    # Finite, in case there are no keys.
    best = gl.full((TILE,), -1e30, gl.float32, ROWS)
    total = gl.zeros((TILE,), gl.float32, ROWS)
    none = gl.zeros((TILE, TILE), gl.float32, SCORES)
    acc = gl.zeros((TILE, SHAPE.D), gl.float32, MIXED)
    last = first + gl.maximum(gl.cdiv(place.others, TILE), 1) - 1
    await_stage(tiles, tile)
    queries = buffer(tiles, 0, tile)
    scores = _scores(queries, chunks, first, none, False)
    for step in range(first, last):
        # The next scores come while these are weighed. (Products in flight do not outlive a turn
        # of the loop: the compiler would let none run behind another.)
        coming = _scores(queries, chunks, step + 1, none, True)
        p, best, total, shrink = _weigh(scores, best, total, SCALE)
        mixed = _mix(p, buffer(chunks, 1, step), acc, shrink)
        scores, acc = warpgroup_mma_wait(0, deps=(coming, mixed))
        give_back(chunks, step, last_tile)
    give_back(tiles, tile, True)
    offs = (last - first) * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    scores = gl.where((offs < place.others)[None, :], scores, float("-inf"))
    p, best, total, shrink = _weigh(scores, best, total, SCALE)
    mixed = _mix(p, buffer(chunks, 1, last), acc, shrink)
    acc = warpgroup_mma_wait(0, deps=(mixed,))
    give_back(chunks, last, last_tile)
    if place.others == 0:
        best = best * 0.0
        total = best + 1.0
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, MIXED))
    write_rows(acc * inverse[:, None], out_ptr, SHAPE.H * SHAPE.D, place, SHAPE.D)
    if lse_ptr is not None:
        offs = gl.arange(0, TILE, ROWS)
        lse_ptr += place.head.to(gl.int64) * Tq + place.row
        gl.store(lse_ptr + offs, best + gl.log2(total), offs < place.count)


@gluon.jit(do_not_specialize=["stride_q", "stride_k", "stride_v", "N", "Tq"])
def _attention_hopper_kernel(
    query, key, value, query_cu_ptr, key_cu_ptr, shares_ptr, out_ptr, lse_ptr,
    stride_q, stride_k, stride_v, N, Tq,
    SCALE: gl.constexpr, H: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """Strides are those of heads. TILES and CHUNKS fit into their rings."""
    SHAPE: gl.constexpr = Shape(H, D, SCALE, PARTS)
    tiled = Operand((query,), (stride_q,), None)
    chunked = Operand((key, value), (stride_k, stride_v), None)
    bounds = (query_cu_ptr, key_cu_ptr, shares_ptr, N)
    results = (out_ptr, lse_ptr, Tq)
    specialise(_attend, bounds, results, tiled, chunked, TILES, CHUNKS, SHAPE)


def attention_hopper(operands: AttentionOperands, out: Tensor, lse: Tensor | None) -> None:
    """Fill ``out [Tq, H, d]`` and, where it is wanted, ``lse [H, Tq]``, as
    :func:`~sparton.kernels.varlen_attention.forward.varlen_attention_forward` says."""
    tensors, bounds = operands[:3], operands[3:5]
    Tq, H, d = out.shape
    shares = share_out(operands, TILE.value)
    Launch(
        _attention_hopper_kernel, ((len(shares) - 1) * H,), *(x.stride(1) for x in tensors),
        len(bounds[0]) - 1, Tq, SCALE=operands.scale, H=H, D=d, TILES=TILES_EACH * PARTS.value,
        CHUNKS=MOST_CHUNKS, num_warps=4,
    )(*map(rows_of, tensors), *bounds, shares, out, lse)  # fmt: skip
