"""What the residual kernel reads beside the documents, made in one launch.

W query tokens (columns), E embedding, C centroids, P bytes of a residual.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import Launch, cdiv, next_power_of_2
from sparton.kernels.maxsim.codec import ResidualCodec

EPSILON = tl.constexpr(1e-12)
BLOCK_C = 64
BLOCK_E = 16


@triton.jit
def _unit(queries_ptr, w, e, last, longer, dtype: tl.constexpr, E: tl.constexpr):
    """Elements ``[BLOCK_W, BLOCK_E]`` of normalised query tokens in ``dtype``, zeros outside."""
    present = (w < last)[:, None] & (e < E)[None, :]
    x = tl.load(queries_ptr + w.to(tl.int64)[:, None] * E + e[None, :], present, 0.0)
    if longer is not None:
        x = tl.div_rn(x.to(tl.float32), tl.broadcast_to(longer[:, None], x.shape))
    return x.to(dtype)


@triton.jit
def mirrored(number, NBITS: tl.constexpr):
    """The lowest bits in reverse order."""
    result = number * 0
    for bit in tl.static_range(NBITS):
        result |= (number >> bit & 1) << NBITS - 1 - bit
    return result


@triton.jit
def _weight_bits(weights_ptr, number, NBITS: tl.constexpr, dtype: tl.constexpr):
    places = weights_ptr + mirrored(number, NBITS)
    return tl.load(places, number < 1 << NBITS, 0.0).to(dtype).to(tl.int16, bitcast=True)


@triton.jit
def _fill_table(
    weights_ptr, table_ptr, dtype: tl.constexpr, NBITS: tl.constexpr, UNPACK: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    number = tl.arange(0, SIZE)
    if UNPACK == "table":
        weights = tl.load(weights_ptr + mirrored(number, NBITS))
        tl.store(table_ptr + number, weights.to(dtype))
    elif NBITS == 4:
        # Two bytes at once: the low ones of all weights, then the high ones.
        first = _weight_bits(weights_ptr, number % 8 * 2, NBITS, dtype)
        second = _weight_bits(weights_ptr, number % 8 * 2 + 1, NBITS, dtype)
        low = first & 0xFF | second << 8
        high = first >> 8 & 0xFF | second & -0x100
        tl.store(table_ptr + number, tl.where(number < 8, low, high).to(tl.int16))
    else:
        tl.store(table_ptr + number, _weight_bits(weights_ptr, number, NBITS, dtype))


@triton.jit(do_not_specialize=["C", "first", "last"])
def _prepare_kernel(
    queries_ptr, centroids_ptr, weights_ptr, tokens_ptr, products_ptr, table_ptr,
    C, width, first, last,
    E: tl.constexpr, P: tl.constexpr, NBITS: tl.constexpr, NORMALIZE: tl.constexpr,
    UNPACK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = tokens_ptr.dtype.element_ty
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    w = first + column
    longer = None
    if NORMALIZE:
        square = tl.zeros((BLOCK_W,), tl.float32)
        for first_e in range(0, E, BLOCK_E):
            e = first_e + tl.arange(0, BLOCK_E)
            x = _unit(queries_ptr, w, e, last, None, tl.float32, E)
            square += tl.sum(x * x, 1)
        longer = tl.maximum(tl.sqrt_rn(square), EPSILON)
    c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    product = tl.zeros((BLOCK_C, BLOCK_W), tl.float32)
    for first_e in range(0, E, BLOCK_E):
        e = first_e + tl.arange(0, BLOCK_E)
        x = _unit(queries_ptr, w, e, last, longer, dtype, E).to(tl.float32)
        present = (c < C)[:, None] & (e < E)[None, :]
        centroid = tl.load(centroids_ptr + c[:, None] * E + e[None, :], present, 0.0)
        product = tl.dot(centroid.to(tl.float32), x.T, product, input_precision="ieee")
    places = products_ptr + c[:, None] * width + column[None, :]
    tl.store(places, product, (c < C)[:, None])
    if tl.program_id(0) == 0:
        for first_row in tl.static_range(0, ROWS, BLOCK_ROWS):
            row = first_row + tl.arange(0, BLOCK_ROWS)
            byte = row // (BLOCK_P * 8 // NBITS) * BLOCK_P + row % BLOCK_P
            place = byte * (8 // NBITS) + row // BLOCK_P % (8 // NBITS)
            token = _unit(queries_ptr, w, tl.where(byte < P, place, E), last, longer, dtype, E)
            offs = row[None, :].to(tl.int64) * width + column[:, None]
            tl.store(tokens_ptr + offs, token, (row < ROWS)[None, :])
        if tl.program_id(1) == 0:
            _fill_table(weights_ptr, table_ptr, dtype, NBITS, UNPACK, SIZE)


def prepare(
    queries: Tensor,
    codec: ResidualCodec,
    first: int,
    last: int,
    *,
    dtype: torch.dtype,
    normalize: bool,
    unpack: str,
    block_w: int,
    block_p: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query tokens, products with the centroids and bucket weights as the residual kernel reads
    them.

    Args:
        queries: ``[W, E]``, contiguous.
        codec: what the documents were compressed with; contiguous.
        first, last: the query tokens wanted.
        dtype: what normalised tokens and bucket weights are rounded to.
        normalize: give query tokens unit length.
        unpack: "table" leaves bucket weights in ``dtype``, in the order in which the packed bytes
            number them. "permute" makes integers of 64 bits: one that holds all of up to 4
            weights, or, for 16 weights, their low bytes in two and then their high bytes in two.
        block_w: the number of columns is a multiple of it.
        block_p: bytes of a residual that enter one matrix product.

    Returns:
        tokens ``[rows, columns]`` in ``dtype``, dimensions that share a place within their bytes
        side by side and zeros beyond the edges; fp32 ``[C, columns]``, products of the rounded
        tokens; bucket weights.
    """
    E, C, nbits = queries.shape[1], codec.centroids.shape[0], codec.nbits
    P, per_byte, device = E * nbits // 8, 8 // nbits, queries.device
    width = cdiv(last - first, block_w) * block_w
    rows = cdiv(P, block_p) * block_p * per_byte
    tokens = torch.empty(rows, width, dtype=dtype, device=device)
    products = torch.empty(C, width, dtype=torch.float32, device=device)
    size = 2**nbits if unpack == "table" else max(2**nbits, 4)
    table = torch.empty(size, dtype=dtype if unpack == "table" else torch.int16, device=device)
    block_w = min(block_w, 32)
    Launch(
        _prepare_kernel, (cdiv(C, BLOCK_C), width // block_w), C, width, first, last,
        E=E, P=P, NBITS=nbits, NORMALIZE=normalize, UNPACK=unpack, SIZE=size, ROWS=rows,
        BLOCK_P=block_p, BLOCK_ROWS=min(next_power_of_2(rows), 128), BLOCK_W=block_w,
        BLOCK_C=BLOCK_C, BLOCK_E=BLOCK_E, num_warps=8,
    )(queries, codec.centroids, codec.bucket_weights, tokens, products, table)  # fmt: skip
    return tokens, products, table if unpack == "table" else table.view(torch.int64)
