"""The best token of one compressed document for some query tokens; device functions.

W query tokens (columns), P bytes of a token's residual. What they read beside the documents is as
prepare.py makes it.
"""

import triton
import triton.language as tl

from sparton.kernels.maxsim.residual.lookup import bucket_weights
from sparton.kernels.segment_max.reduction import greater


@triton.jit
def _occupied_length(mask_ptr, length, BLOCK: tl.constexpr):
    """Tokens up to the last one that takes part."""
    last = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, length, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        present = tl.load(mask_ptr + offs, offs < length, 0) != 0
        last = tl.maximum(last, tl.where(present, offs + 1, 0))
    return tl.max(last, 0)


@triton.jit
def locate_document(cu_ptr, mask_ptr, n):
    """The first token of document ``n``, int64, and how many matter, int32."""
    start = tl.load(cu_ptr + n).to(tl.int64)
    length = (tl.load(cu_ptr + n + 1) - start).to(tl.int32)
    if mask_ptr is not None:
        length = _occupied_length(mask_ptr + start, length, 1024)
    return start, length


@triton.jit
def document_maxima(
    queries_ptr, products_ptr, codes_ptr, residuals_ptr, inverse_ptr, table_ptr, mask_ptr,
    table, start, length, offs_w, W,
    P: tl.constexpr, NBITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr, UNPACK: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """The largest similarity of each column ``offs_w``, -inf where no token takes part, and with
    ARGMAX the first token that attains it, counted from the document's start; otherwise the same
    again. With P = 0 bytes of residuals the products are all."""
    rows = tl.arange(0, BLOCK_T)
    offs_p = tl.arange(0, BLOCK_P)
    best = tl.full((BLOCK_T, BLOCK_W), float("-inf"), tl.float32)
    tile = tl.zeros((BLOCK_T, BLOCK_W), tl.int32)
    # The compiler pipelines only what the matrix product reads; the codes run ahead by hand.
    code = tl.load(codes_ptr + start + rows, rows < length, 0).to(tl.int64)
    for first in range(0, length, BLOCK_T):
        token = start + first + rows
        valid = first + rows < length
        acc = tl.load(products_ptr + code[:, None] * W + offs_w[None, :])
        ahead = first + BLOCK_T + rows
        code = tl.load(codes_ptr + start + ahead, ahead < length, 0).to(tl.int64)
        if inverse_ptr is not None:
            inverse = tl.load(inverse_ptr + token, valid, 0.0).to(tl.float32)
        takes_part = valid
        if mask_ptr is not None:
            takes_part &= tl.load(mask_ptr + token, valid, 0) != 0
        for p in tl.static_range(0, P, BLOCK_P):
            present = valid[:, None] & (p + offs_p < P)[None, :]
            places = token[:, None] * P + p + offs_p[None, :]
            packed = tl.load(residuals_ptr + places, present, 0)
            for j in tl.static_range(8 // NBITS):
                row = p * (8 // NBITS) + j * BLOCK_P + offs_p
                query = tl.load(queries_ptr + row[:, None] * W + offs_w[None, :])
                weights = bucket_weights(packed, j, table, table_ptr, query, NBITS, UNPACK)
                acc = tl.dot(weights, query, acc, input_precision="ieee")
        similarity = acc
        if inverse_ptr is not None:
            similarity *= inverse[:, None]
        similarity = tl.where(takes_part[:, None], similarity, float("-inf"))
        if ARGMAX:
            tile = tl.where(similarity > best, first, tile)
        best = greater(best, similarity)
    maximum = tl.reduce(best, 0, greater)
    winner = maximum
    if ARGMAX:
        # Nothing is less than NaN.
        winner = tl.min(tl.where(best < maximum[None, :], 2**31 - 1, tile + rows[:, None]), 0)
    return maximum, winner
