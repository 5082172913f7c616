"""Backward on Hopper (compute capability 9.0), where queries see all keys: specialised warps, in
Gluon.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.

As in backward.py, two kernels compute the weights each for themselves: the tiles of one are of
queries, their results and these results' gradients, those of the other of keys and values, in the
rings of hopper_rings.py. So what is summed, and the weights that it is summed with, never leave the
registers: products take the one from there and add to the other (WGMMA).
"""

from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparton.kernels.launch import Launch, cdiv
from sparton.kernels.tiles import Descriptor
from sparton.kernels.varlen_attention.hopper_rings import (
    MOST_CHUNKS,
    TILE,
    Operand,
    Shape,
    await_stage,
    buffer,
    give_back,
    lines,
    product,
    rows_of,
    specialise,
    write_norms,
    write_rows,
)
from sparton.kernels.varlen_attention.operands import AttentionOperands
from sparton.kernels.varlen_attention.shares import share_out
from sparton.kernels.varlen_attention.tiles import LOG2_E

# Warpgroups that multiply, and tiles in the ring for each of them. More do not fit: tiles of
# queries lie beside eight chunks, and sums of keys and of values in registers.
QUERY_PARTS, KEY_PARTS = gl.constexpr(3), gl.constexpr(2)
QUERIES_EACH, KEYS_EACH = 1, 2
PLAIN = gl.NVMMASharedLayout(0, 32, rank=2)


@gluon.jit
def _products(rows, dependents, chunks, step, none):
    """Begin to multiply a tile's two tensors with the two of a chunk, when it is there: scores, and
    gradients of the weights."""
    await_stage(chunks, step)
    left, right = buffer(chunks, 0, step), buffer(chunks, 1, step)
    scores = warpgroup_mma(rows, left.permute((1, 0)), none, use_acc=False, is_async=True)
    dweights = warpgroup_mma(dependents, right.permute((1, 0)), none, use_acc=False, is_async=True)
    return scores, dweights


@gluon.jit
def _add(x, rows, acc):
    """Begin to add ``x @ rows``."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(x.to(rows.dtype), OPERAND), rows, acc, is_async=True)


@gluon.jit
def _delta(gradients, out, D: gl.constexpr):
    """Products of results and their gradients, of each query."""
    READ: gl.constexpr = lines(D)
    return gl.sum(out.load(READ).to(gl.float32) * gradients.load(READ).to(gl.float32), 1)


@gluon.jit
def _dquery(results, place, tiles, tile, chunks, first, last_tile, SHAPE: gl.constexpr):
    """Gradients of a tile of queries. Their logarithms and deltas go where the other kernel reads
    them."""
    lse_ptr, sums_ptr, dquery_ptr, norms_ptr, Tq, stride_s, stride_d = results
    SCORES: gl.constexpr = product(TILE)
    SUMMED: gl.constexpr = product(SHAPE.D)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    offs = gl.arange(0, TILE, ROWS)
    real = offs < place.count
    head = place.head.to(gl.int64)
    lse = gl.load(lse_ptr + head * Tq + place.row + offs, real, 0.0)
    await_stage(tiles, tile)
    queries, gradients = buffer(tiles, 0, tile), buffer(tiles, 1, tile)
    delta = gl.convert_layout(_delta(gradients, buffer(tiles, 2, tile), SHAPE.D), ROWS)
    sums_ptr += 2 * head * stride_s + place.sums_row
    gl.store(sums_ptr + offs, lse, real)
    gl.store(sums_ptr + stride_s + offs, delta, real)
    none = gl.zeros((TILE, TILE), gl.float32, SCORES)
    dquery = gl.zeros((TILE, SHAPE.D), gl.float32, SUMMED)
    last = first + gl.maximum(gl.cdiv(place.others, TILE), 1) - 1
    for step in range(first, last + 1):
        scores, dweights = _products(queries, gradients, chunks, step, none)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        p = gl.exp2(scores * (SHAPE.SCALE * LOG2_E) - lse[:, None])
        dweights = warpgroup_mma_wait(0, deps=(dweights,))
        ds = p * (dweights - delta[:, None])
        if step == last:
            keys = (last - first) * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
            ds = gl.where((keys < place.others)[None, :], ds, 0.0)
        dquery = _add(ds, buffer(chunks, 0, step), dquery)
        dquery = warpgroup_mma_wait(0, deps=(dquery,))
        give_back(chunks, step, last_tile)
    give_back(tiles, tile, True)
    dquery *= SHAPE.SCALE
    write_norms(dquery, norms_ptr, Tq, place)
    write_rows(dquery, dquery_ptr, stride_d, place, SHAPE.D)


@gluon.jit
def _dkey(results, place, tiles, tile, chunks, first, last_tile, SHAPE: gl.constexpr):
    """Gradients of a tile of keys and of their values."""
    dkey_ptr, dvalue_ptr, key_norms_ptr, value_norms_ptr, Tk, stride_d = results
    SCORES: gl.constexpr = product(TILE)
    SUMMED: gl.constexpr = product(SHAPE.D)
    offs = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    none = gl.zeros((TILE, TILE), gl.float32, SCORES)
    dkey = gl.zeros((TILE, SHAPE.D), gl.float32, SUMMED)
    dvalue = gl.zeros((TILE, SHAPE.D), gl.float32, SUMMED)
    await_stage(tiles, tile)
    keys, values = buffer(tiles, 0, tile), buffer(tiles, 1, tile)
    for chunk in range(gl.maximum(gl.cdiv(place.others, TILE), 1)):
        step = first + chunk
        scores, dweights = _products(keys, values, chunks, step, none)
        # Another sequence's query has no weight.
        real = (chunk * TILE + offs < place.others)[None, :]
        sums = buffer(chunks, 2, step)
        lse = gl.where(real, sums.slice(0, 1, 0).load(SCORES), float("inf"))
        delta = gl.where(real, sums.slice(1, 1, 0).load(SCORES), 0.0)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        p = gl.exp2(scores * (SHAPE.SCALE * LOG2_E) - lse)
        dvalue = _add(p, buffer(chunks, 1, step), dvalue)
        dweights = warpgroup_mma_wait(1, deps=(dweights,))
        dkey = _add(p * (dweights - delta), buffer(chunks, 0, step), dkey)
        dkey, dvalue = warpgroup_mma_wait(0, deps=(dkey, dvalue))
        give_back(chunks, step, last_tile)
    give_back(tiles, tile, True)
    dkey *= SHAPE.SCALE
    write_norms(dkey, key_norms_ptr, Tk, place)
    write_norms(dvalue, value_norms_ptr, Tk, place)
    write_rows(dkey, dkey_ptr, stride_d, place, SHAPE.D)
    write_rows(dvalue, dvalue_ptr, stride_d, place, SHAPE.D)


@gluon.jit(
    do_not_specialize=["stride_q", "stride_g", "stride_k", "stride_v", "N", "Tq", "stride_s"]
)
def _dquery_hopper_kernel(
    query, grad, out, key, value, query_cu_ptr, key_cu_ptr, shares_ptr, lse_ptr, sums_ptr,
    dquery_ptr, norms_ptr,
    stride_q, stride_g, stride_k, stride_v, N, Tq, stride_s, stride_d,
    SCALE: gl.constexpr, H: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """Strides are those of heads, of a row of sums and of the gradient's tokens. TILES and CHUNKS
    fit into their rings."""
    SHAPE: gl.constexpr = Shape(H, D, SCALE, QUERY_PARTS)
    tiled = Operand((query, grad, out), (stride_q, stride_g, D), None)
    chunked = Operand((key, value), (stride_k, stride_v), None)
    bounds = (query_cu_ptr, key_cu_ptr, shares_ptr, N)
    results = (lse_ptr, sums_ptr, dquery_ptr, norms_ptr, Tq, stride_s, stride_d)
    specialise(_dquery, bounds, results, tiled, chunked, TILES, CHUNKS, SHAPE)


@gluon.jit(do_not_specialize=["stride_q", "stride_g", "stride_k", "stride_v", "N", "Tk"])
def _dkey_hopper_kernel(
    query, grad, key, value, sums, query_cu_ptr, key_cu_ptr, shares_ptr, dkey_ptr, dvalue_ptr,
    key_norms_ptr, value_norms_ptr,
    stride_q, stride_g, stride_k, stride_v, N, Tk, stride_d,
    SCALE: gl.constexpr, H: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """As the kernel before; ``sums`` are its sums."""
    SHAPE: gl.constexpr = Shape(H, D, SCALE, KEY_PARTS)
    tiled = Operand((key, value), (stride_k, stride_v), None)
    chunked = Operand((query, grad), (stride_q, stride_g), sums)
    bounds = (key_cu_ptr, query_cu_ptr, shares_ptr, N)
    results = (dkey_ptr, dvalue_ptr, key_norms_ptr, value_norms_ptr, Tk, stride_d)
    specialise(_dkey, bounds, results, tiled, chunked, TILES, CHUNKS, SHAPE)


def attention_backward_hopper(
    operands: AttentionOperands,
    given: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    norms: Sequence[Tensor | None] = (None, None, None),
) -> None:
    """Fill the gradients of query, key and value, and norms, given the results, the logarithms and
    the results' gradient, as
    :func:`~sparton.kernels.varlen_attention.backward.varlen_attention_backward` says."""
    bounds, (out, lse, grad), (dquery, dkey, dvalue) = operands[3:5], given, gradients
    Tq, H, d = out.shape
    N = len(bounds[0]) - 1
    tensors = (operands.query, grad, operands.key, operands.value)
    # For each head its queries' logarithms and deltas.
    sums = lse.new_empty(2 * H, 4 * cdiv(Tq + 3 * N, 4))
    query, grad, key, value = map(rows_of, tensors)
    columns = Descriptor(sums, sums.shape, sums.stride(), [2, TILE.value], PLAIN)
    strides = [x.stride(1) for x in tensors]
    shares = share_out(operands, TILE.value)
    grid = ((len(shares) - 1) * H,)
    constants = {"SCALE": operands.scale, "H": H, "D": d, "CHUNKS": MOST_CHUNKS, "num_warps": 4}
    Launch(
        _dquery_hopper_kernel, grid, *strides, N, Tq, sums.stride(0), dquery.stride(0),
        TILES=QUERIES_EACH * QUERY_PARTS.value, **constants,
    )(
        query, grad, rows_of(out), key, value, *bounds, shares, lse, sums, dquery, norms[0],
    )  # fmt: skip
    Launch(
        _dkey_hopper_kernel, grid, *strides, N, len(dkey), dkey.stride(0),
        TILES=KEYS_EACH * KEY_PARTS.value, **constants,
    )(query, grad, key, value, columns, *bounds, shares, dkey, dvalue, *norms[1:])  # fmt: skip
