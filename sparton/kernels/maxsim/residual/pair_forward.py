"""Listed pairs of a query and a compressed document: their tokens are read in place.

P pairs, Q queries, N documents, T document tokens, W query tokens (columns), E embedding, C
centroids. A program owns one pair, and has its query's tokens one tile after the other.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import Launch, cdiv
from sparton.kernels.maxsim.lengths import assert_pair
from sparton.kernels.maxsim.residual.centroid_forward import centroid_products, unit_columns
from sparton.kernels.maxsim.residual.forward import (
    DEFAULT,
    FULL_PRECISION,
    ResidualConfig,
    bytes_of,
    choose_blocks,
    choose_unpack,
)
from sparton.kernels.maxsim.residual.lookup import load_table
from sparton.kernels.maxsim.residual.maxima import document_maxima, locate_document
from sparton.kernels.maxsim.residual.operands import ResidualOperands
from sparton.kernels.maxsim.residual.prepare import prepare


# `debug` keeps the assertions; overflows are not looked for.
@triton.jit(debug=True, do_not_specialize=["Q", "N"])
def _maxsim_residual_pairs_kernel(
    queries_ptr, products_ptr, codes_ptr, residuals_ptr, inverse_ptr, table_ptr, query_mask_ptr,
    document_mask_ptr, query_cu_ptr, document_cu_ptr, pairs_ptr, scores_ptr, Q, N, W,
    P: tl.constexpr, NBITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr, UNPACK: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """ALONE: there is one query, and so the columns of every tile are aligned."""
    p = tl.program_id(0).to(tl.int64)
    q, n = p, p
    if pairs_ptr is not None:
        q = tl.load(pairs_ptr + 2 * p).to(tl.int64)
        n = tl.load(pairs_ptr + 2 * p + 1).to(tl.int64)
        assert_pair(q, Q, n, N)
    end = tl.load(query_cu_ptr + q + 1).to(tl.int32)
    begin = end * 0
    if not ALONE:
        begin = tl.load(query_cu_ptr + q).to(tl.int32)
    start, length = locate_document(document_cu_ptr, document_mask_ptr, n)
    table = load_table(table_ptr, NBITS, UNPACK, BLOCK_P)
    total = tl.zeros((BLOCK_W,), tl.float32)
    for first in range(0, end - begin, BLOCK_W):
        offs_w = first + tl.arange(0, BLOCK_W)
        if not ALONE:
            offs_w += begin
        maximum, _ = document_maxima(
            queries_ptr, products_ptr, codes_ptr, residuals_ptr, inverse_ptr, table_ptr,
            document_mask_ptr, table, start, length, offs_w, W,
            P, NBITS, BLOCK_T, BLOCK_W, BLOCK_P, UNPACK, False,
        )  # fmt: skip
        present = offs_w < end
        if query_mask_ptr is not None:
            present &= tl.load(query_mask_ptr + offs_w, present, 0) != 0
        total += tl.where(present & (maximum != float("-inf")), maximum, 0.0)
    tl.store(scores_ptr + p, tl.sum(total, 0))


def pair_forward(
    operands: ResidualOperands,
    pairs: Tensor | None,
    normalize: bool,
    dtype: torch.dtype,
    config: ResidualConfig | None = None,
) -> Tensor:
    """Launch the kernels.

    Args:
        operands: contiguous; those without residuals are scored in fp32.
        pairs: int32 ``[P, 2]``, contiguous; None for query p and document p.
        normalize: L2-normalise the query tokens.
        dtype: what they, and bucket weights, are rounded to where there are residuals.
        config: how to launch; by default DEFAULT or, for float32 residuals, FULL_PRECISION.

    Returns:
        fp32 ``[P]``.
    """
    queries, codes, residuals, inverse_norms, centroids, *_ = operands
    (W, E), (Q, N) = queries.shape, operands.scores_shape
    count = Q if pairs is None else pairs.shape[0]
    if count == 0 or W == 0:
        return torch.zeros(count, dtype=torch.float32, device=queries.device)
    if config is None:
        precise = residuals is not None and dtype == torch.float32
        config = FULL_PRECISION if precise else DEFAULT
    P = 0 if residuals is None else residuals.shape[1]
    # Tiles begin with a query: those of the last one reach beyond all tokens.
    block_w, block_p = choose_blocks(cdiv(W, Q), E, dtype, config, P)
    if Q > 1:
        queries = F.pad(queries, (0, 0, 0, block_w))
    nbits, unpack = 8, "table"
    tokens: Tensor | None = None
    table: Tensor | None = None
    if residuals is not None:
        nbits = operands.codec.nbits
        unpack = choose_unpack(config, nbits, dtype, queries.device)
        tokens, products, table = prepare(
            queries, operands.codec, 0, len(queries), dtype=dtype, normalize=normalize,
            unpack=unpack, block_w=block_w, block_p=block_p,
        )  # fmt: skip
    else:
        products = centroid_products(unit_columns(queries, normalize), centroids, block_w)
    scores = torch.empty(count, dtype=torch.float32, device=queries.device)
    Launch(
        _maxsim_residual_pairs_kernel, (count,), Q, N, products.shape[1],
        P=P, NBITS=nbits, BLOCK_T=config.block_t, BLOCK_W=block_w, BLOCK_P=block_p, UNPACK=unpack,
        ALONE=Q == 1, num_warps=config.num_warps, num_stages=config.num_stages,
        sanitize_overflow=False,
    )(
        tokens, products, codes, residuals, inverse_norms, table, bytes_of(operands.query_mask),
        bytes_of(operands.document_mask), operands.query_cu_seqlens, operands.document_cu_seqlens,
        pairs, scores,
    )  # fmt: skip
    return scores
