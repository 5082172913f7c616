"""Bucket weights of packed residuals; device functions.

Bytes come as tiles ``[tokens, BLOCK_P]``. The table holds the weights in the order in which the
packed bytes number the buckets.
"""

import triton
import triton.language as tl


@triton.jit
def packed_table(table_ptr, NBITS: tl.constexpr, BLOCK_P: tl.constexpr):
    """All weights of 16 bits, at most 4, in one integer; int64 ``[1, BLOCK_P]`` of equal elements.
    The compiler keeps unpacking within the threads that multiply only if nothing that it needs is
    a scalar."""
    zeros = tl.zeros((1, BLOCK_P), tl.int32)
    packed = zeros.to(tl.int64)
    for number in tl.static_range(1 << NBITS):
        bits = tl.load(table_ptr + number + zeros).to(tl.int16, bitcast=True)
        packed |= (bits.to(tl.int64) & 0xFFFF) << 16 * number
    return packed


@triton.jit
def _permuted(packed, table, query, shift, mask):
    """Weights of the numbers at bits ``shift`` and up, for 4 bytes at once. A number n becomes the
    byte ``0x10 + 0x22 * n``, which selects the bytes 2n and 2n + 1 of the table."""
    low, high = table.to(tl.int32), (table >> 32).to(tl.int32)
    zeros = tl.zeros((1, packed.shape[1]), tl.int32)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 x;
        shr.u32 x, $2, $11;
        and.b32 x, x, $15;
        mad.lo.u32 x, x, 0x22, 0x10101010;
        prmt.b32 $0, $3, $7, x;
        shr.u32 x, x, 16;
        prmt.b32 $1, $3, $7, x;
        }
        """,
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [packed, low, high, zeros + shift, zeros + mask * 0x01010101],
        dtype=query.dtype,
        is_pure=True,
        pack=4,
    )


@triton.jit
def bucket_weights(
    packed, place, table, table_ptr, query, NBITS: tl.constexpr, UNPACK: tl.constexpr
):
    """Weights, in the dtype of ``query``, of the numbers at one place within their bytes, 0 for the
    highest bits."""
    shift = 8 - NBITS * (place + 1)
    mask = (1 << NBITS) - 1
    if UNPACK == "permute":
        return _permuted(packed, table, query, shift, mask)
    numbers = packed.to(tl.int32) >> shift & mask
    if UNPACK == "shift":
        return (table >> (numbers * 16).to(tl.int64)).to(tl.int16).to(query.dtype, bitcast=True)
    return tl.load(table_ptr + numbers)
