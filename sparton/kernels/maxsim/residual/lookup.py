"""Bucket weights of packed residuals; device functions.

Bytes come as tiles ``[tokens, BLOCK_P]``; the weights are as prepare.py makes them.
"""

import triton
import triton.language as tl


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
def load_table(table_ptr, NBITS: tl.constexpr, UNPACK: tl.constexpr, BLOCK_P: tl.constexpr):
    """What :func:`bucket_weights` unpacks with, int64 ``[1, BLOCK_P]`` of equal elements: the
    compiler keeps unpacking within the threads that multiply only if nothing it needs is a scalar.
    """
    zeros = tl.zeros((1, BLOCK_P), tl.int32)
    table = None
    if UNPACK == "permute":
        table = tl.load(table_ptr + zeros)
        if NBITS == 4:
            low_last = tl.load(table_ptr + 1 + zeros)
            high_first = tl.load(table_ptr + 2 + zeros)
            high_last = tl.load(table_ptr + 3 + zeros)
            table = (table, low_last, high_first, high_last)
    return table


@triton.jit
def _permuted_of_16(packed, tables, query, shift):
    """Weights of the 4-bit numbers at bits ``shift`` and up, for 4 bytes at once. The numbers, side
    by side, select bytes from the first and the last 8 weights; their highest bits say which of the
    two to take; low and high bytes then make weights."""
    zeros = tl.zeros((1, packed.shape[1]), tl.int32)
    low_first, low_last, high_first, high_last = tables
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, s, m, a, b, low, high;
        shr.u32 x, $2, $35;
        and.b32 x, x, 0x0F0F0F0F;
        shr.u32 s, x, 4;
        or.b32 s, s, x;
        prmt.b32 s, s, s, 0x2020;
        and.b32 s, s, 0x7777;
        shl.b32 m, x, 4;
        prmt.b32 m, m, m, 0xBA98;
        prmt.b32 a, $3, $7, s;
        prmt.b32 b, $11, $15, s;
        lop3.b32 low, a, b, m, 0xD8;
        prmt.b32 a, $19, $23, s;
        prmt.b32 b, $27, $31, s;
        lop3.b32 high, a, b, m, 0xD8;
        prmt.b32 $0, low, high, 0x5140;
        prmt.b32 $1, low, high, 0x7362;
        }
        """,
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [
            packed,
            low_first.to(tl.int32),
            (low_first >> 32).to(tl.int32),
            low_last.to(tl.int32),
            (low_last >> 32).to(tl.int32),
            high_first.to(tl.int32),
            (high_first >> 32).to(tl.int32),
            high_last.to(tl.int32),
            (high_last >> 32).to(tl.int32),
            zeros + shift,
        ],
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
        if NBITS == 4:
            weights = _permuted_of_16(packed, table, query, shift)
        else:
            weights = _permuted(packed, table, query, shift, mask)
    else:
        weights = tl.load(table_ptr + (packed.to(tl.int32) >> shift & mask))
    return weights
