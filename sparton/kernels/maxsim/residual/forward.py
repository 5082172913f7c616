"""Late interaction with compressed documents: one kernel, the embeddings exist only in registers.

Q queries, N documents, T document tokens, W query tokens (columns), E embedding, C centroids,
P bytes of a token's residual.

A similarity is ``(query . centroid + query . residual) * inverse norm``. The products with the
centroids are made once for all documents, ``[C, W]``; a program owns one document and BLOCK_W
columns, gathers those products by code and adds the product with the unpacked residuals. The sum
over E does not care for its order, so the dimensions that share a place within their bytes form one
matrix product: bytes are read once and never rearranged.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import Launch, cdiv, next_power_of_2
from sparton.kernels.maxsim.residual.lookup import load_table
from sparton.kernels.maxsim.residual.maxima import document_maxima, locate_document
from sparton.kernels.maxsim.residual.operands import ResidualOperands
from sparton.kernels.maxsim.residual.prepare import prepare

PRODUCTS_AT_ONCE = 2**24
COLUMNS_AT_ONCE = 2**14
QUERY_BYTES = 2**16
MAXIMA_AT_ONCE = 2**26


class ResidualConfig(NamedTuple):
    """How to launch the kernel; all but ``num_warps`` and ``num_stages`` are powers of 2.

    Attributes:
        block_t: document tokens of a tile.
        block_w: most query tokens of a tile, which may have QUERY_BYTES.
        block_p: most bytes of a token that enter one matrix product.
        unpack: how bucket weights are looked up: "table" (in memory), or "permute", for 16-bit
            weights of up to 4 bits on a GPU (byte permutations for four weights at once, in PTX).
    """

    block_t: int = 64
    block_w: int = 64
    block_p: int = 128
    unpack: Literal["table", "permute"] = "permute"
    num_warps: int = 4
    num_stages: int = 3


DEFAULT = ResidualConfig()
FULL_PRECISION = ResidualConfig(32, 32, 32, num_stages=2)


def _launch_metadata(grid: tuple, kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """For Triton's profiler: useful FLOPs, and bytes if every tensor were moved once."""
    T, W, E = (arguments[name] for name in ("T", "W", "E"))
    read = [arguments[f"{name}_ptr"] for name in ("codes", "residuals", "inverse", "products")]
    described = {
        "name": f"{kernel.name} [T={T}, E={E}, W={W}]",
        "bytes": sum(x.numel() * x.element_size() for x in read if x is not None),
    }
    if arguments["queries_ptr"] is not None:
        described[f"flops{8 * arguments['queries_ptr'].element_size()}"] = 2 * T * W * E
    return described


@triton.jit(do_not_specialize=["T", "last_w"], launch_metadata=_launch_metadata)
def _maxsim_residual_fwd_kernel(
    queries_ptr, products_ptr, codes_ptr, residuals_ptr, inverse_ptr, table_ptr, mask_ptr, cu_ptr,
    maximum_ptr, argmax_ptr, T, W, last_w, stride_an,
    E: tl.constexpr, P: tl.constexpr, NBITS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
    UNPACK: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """One document and BLOCK_W columns."""
    tiles = W // BLOCK_W
    n = (tl.program_id(0) // tiles).to(tl.int64)
    offs_w = tl.program_id(0) % tiles * BLOCK_W + tl.arange(0, BLOCK_W)
    start, length = locate_document(cu_ptr, mask_ptr, n)
    maximum, winner = document_maxima(
        queries_ptr, products_ptr, codes_ptr, residuals_ptr, inverse_ptr, table_ptr, mask_ptr,
        load_table(table_ptr, NBITS, UNPACK, BLOCK_P), start, length, offs_w, W,
        P, NBITS, BLOCK_T, BLOCK_W, BLOCK_P, UNPACK, ARGMAX,
    )  # fmt: skip
    found = maximum != float("-inf")
    tl.store(maximum_ptr + n * W + offs_w, tl.where(found, maximum, 0.0))
    if ARGMAX:
        winner = tl.where(found, winner, -1)
        tl.store(argmax_ptr + n * stride_an + offs_w, winner, offs_w < last_w)


@triton.jit(do_not_specialize=["N", "first_w", "last_w"])
def _sum_queries_kernel(
    maximum_ptr, mask_ptr, cu_ptr, scores_ptr, N, W, stride_qn, first_w, last_w,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Sum the maxima of columns ``first_w : last_w`` for the queries they are of. ADD to what
    earlier columns gave."""
    blocks = tl.cdiv(N, BLOCK_N)
    q = (tl.program_id(0) // blocks).to(tl.int64)
    n = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.maximum(tl.load(cu_ptr + q).to(tl.int32), first_w)
    stop = tl.minimum(tl.load(cu_ptr + q + 1).to(tl.int32), last_w)
    score = tl.zeros((BLOCK_N,), tl.float32)
    if ADD:
        score = tl.load(scores_ptr + q * stride_qn + n, n < N, 0.0)
    for first in range(start, stop, BLOCK_W):
        w = first + tl.arange(0, BLOCK_W)
        present = w < stop
        if mask_ptr is not None:
            present &= tl.load(mask_ptr + w, present, 0) != 0
        places = n[:, None] * W + (w - first_w)[None, :]
        maximum = tl.load(maximum_ptr + places, (n < N)[:, None] & present[None, :], 0.0)
        score += tl.sum(maximum, 1)
    tl.store(scores_ptr + q * stride_qn + n, score, n < N)


def bytes_of(mask: Tensor | None) -> Tensor | None:
    """A boolean mask as the kernels read it."""
    return None if mask is None else mask.view(torch.uint8)


def choose_blocks(
    W: int, E: int, dtype: torch.dtype, config: ResidualConfig, P: int
) -> tuple[int, int]:
    """Blocks of W and of P."""
    block_p = min(max(next_power_of_2(P), 16), config.block_p)
    room = QUERY_BYTES // (next_power_of_2(E) * dtype.itemsize)
    return max(min(next_power_of_2(W), config.block_w, room), 16), block_p


def choose_unpack(
    config: ResidualConfig, nbits: int, dtype: torch.dtype, device: torch.device
) -> Literal["table", "permute"]:
    """How bucket weights are looked up, where the configuration's way may not serve them."""
    permutes = nbits <= 4 and dtype.itemsize == 2 and device.type == "cuda"
    return config.unpack if permutes else "table"


def residual_forward(
    operands: ResidualOperands,
    normalize: bool = False,
    dtype: torch.dtype | None = None,
    argmax: bool = True,
    *,
    config: ResidualConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels.

    Args:
        operands: contiguous, with residuals.
        normalize: L2-normalise the query tokens.
        dtype: what they, and bucket weights, are rounded to; by default their own.
        argmax: also return the winning tokens.
        config: how to launch; by default DEFAULT or, for float32, FULL_PRECISION.

    Returns:
        scores fp32 ``[Q, N]`` and, for each query token (masked or not), the winning token counted
        from the start of its document, int32 ``[N, W]``, -1 for none; empty without argmax.
    """
    queries, _, residuals, _, centroids, *_ = operands
    dtype, device, codec = dtype or queries.dtype, queries.device, operands.codec
    config = config or (FULL_PRECISION if dtype == torch.float32 else DEFAULT)
    assert residuals is not None
    (W, E), P, (Q, N) = queries.shape, residuals.shape[1], operands.scores_shape
    winners = torch.empty((N, W) if argmax else 0, dtype=torch.int32, device=device)
    if N == 0 or W == 0:
        return torch.zeros(Q, N, dtype=torch.float32, device=device), winners
    scores = torch.empty(Q, N, dtype=torch.float32, device=device)
    unpack = choose_unpack(config, codec.nbits, dtype, device)
    block_w, block_p = choose_blocks(W, E, dtype, config, P)
    at_once = min(PRODUCTS_AT_ONCE // centroids.shape[0], COLUMNS_AT_ONCE)
    at_once = max(at_once // block_w, 1) * block_w
    for first in range(0, W, at_once):
        last = min(first + at_once, W)
        prepared = prepare(
            queries, codec, first, last, dtype=dtype, normalize=normalize, unpack=unpack,
            block_w=block_w, block_p=block_p,
        )  # fmt: skip
        search_columns(
            operands, *prepared, scores, winners, first, last,
            E=E, P=P, NBITS=codec.nbits, UNPACK=unpack, BLOCK_T=config.block_t, BLOCK_W=block_w,
            BLOCK_P=block_p, ARGMAX=argmax, num_warps=config.num_warps,
            num_stages=config.num_stages,
        )  # fmt: skip
    return scores, winners


def search_columns(
    operands: ResidualOperands,
    tokens: Tensor | None,
    products: Tensor,
    table: Tensor | None,
    scores: Tensor,
    winners: Tensor,
    first: int,
    last: int,
    **constants: Any,
) -> None:
    """Add to the scores what the query tokens ``first : last`` give, and store their winners.

    Args:
        tokens, products, table: what prepare.py makes of these query tokens; products alone where
            the documents have no residuals.
        scores, winners: ``[Q, N]`` and ``[N, W]``; scores are set if ``first`` is 0.
        constants: of the kernel.
    """
    (Q, N), (_, width), block_w = scores.shape, products.shape, constants["BLOCK_W"]
    W = winners.shape[1] if constants["ARGMAX"] else last
    codes, residuals, inverse_norms = operands[1:4]
    query_mask, document_mask = bytes_of(operands.query_mask), bytes_of(operands.document_mask)
    step = max(MAXIMA_AT_ONCE // width, 1)
    for n in range(0, N, step):
        count = min(step, N - n)
        maximum = torch.empty(count, width, dtype=torch.float32, device=scores.device)
        Launch(
            _maxsim_residual_fwd_kernel, (count * (width // block_w),),
            codes.shape[0], width, W - first, W, **constants,
        )(
            tokens, products, codes, residuals, inverse_norms, table, document_mask,
            operands.document_cu_seqlens[n:], maximum,
            winners[n:, first:] if constants["ARGMAX"] else winners,
        )  # fmt: skip
        Launch(
            _sum_queries_kernel, (Q * cdiv(count, 64),),
            count, width, N, first, last, ADD=first > 0,
            BLOCK_N=64, BLOCK_W=min(block_w, 32), num_warps=4,
        )(maximum, query_mask, operands.query_cu_seqlens, scores[:, n:])  # fmt: skip
