"""Backward of the streaming MaxSim: what both of its ways share, and the gradient of the queries.

Q queries, N documents, C columns of the scores, P pairs, L tokens of the longest query, Tq and Td
packed tokens, E embedding.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import KEPT_PLANS, Launch, cdiv, next_power_of_2
from sparton.kernels.maxsim.normalization import reached
from sparton.kernels.maxsim.operands import MaxSimOperands
from sparton.kernels.maxsim.streaming import inverse_norms

LARGEST_E = 2048


class StreamingBackwardConfig(NamedTuple):
    """How the work is cut; the order of summation, hence the last bits, depend on it.

    Attributes:
        row_elements: elements of the gradients that a program of one warp holds, for queries.
        unroll: columns whose winners such a program reads at once.
        columns: fewest columns that it sums, if there are so many.
        tile_elements, tile_warps: elements and warps of a program for documents.
        block_s: query tokens that it multiplies at once; half as many if E > 256.
        programs: programs to aim at, by splitting columns or documents.
        workspace: bytes that the sums of split columns may take.
    """

    row_elements: int = 1024
    unroll: int = 4
    columns: int = 64
    tile_elements: int = 8192
    tile_warps: int = 8
    block_s: int = 32
    programs: int = 2048
    workspace: int = 8 << 20


DEFAULT_CONFIG = StreamingBackwardConfig()


@triton.jit
def owned_rows(cu_ptr, i, count, total):
    """Rows ``start : stop`` of sequence i and the rows ``first : last`` that its programs write:
    also those, if any, before the first sequence and after the last."""
    start = tl.load(cu_ptr + i)
    stop = tl.load(cu_ptr + i + 1)
    return start, stop, tl.where(i == 0, 0, start), tl.where(i == count - 1, total, stop)


@triton.jit
def _tile(x_ptr, rows, mask, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Addresses of whole rows of ``x`` and which of their elements exist."""
    offs_e = tl.arange(0, BLOCK_E)
    ptrs = x_ptr + rows.to(tl.int64)[:, None] * E + offs_e[None, :]
    return ptrs, mask[:, None] & (offs_e < E)[None, :]


@triton.jit
def load_rows(x_ptr, rows, mask, E: tl.constexpr, BLOCK_E: tl.constexpr):
    ptrs, inside = _tile(x_ptr, rows, mask, E, BLOCK_E)
    return tl.load(ptrs, inside, 0.0)


@triton.jit
def inverse_row_norms(x):
    return inverse_norms(tl.sum(x * x, 1))


@triton.jit
def store_gradient(
    out_ptr, x_ptr, rows, mask, total, E: tl.constexpr, BLOCK_E: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Store ``total`` or, if NORMALIZE, where it is the gradient of ``x / max(|x|, 1e-12)``, that
    of ``x``; rows without a gradient are not read."""
    if NORMALIZE:
        x = load_rows(x_ptr, rows, mask & reached(total), E, BLOCK_E).to(tl.float32)
        inverse = inverse_row_norms(x)
        along = tl.sum(total * x, 1) * inverse * inverse
        along = tl.where(inverse < 9.99e11, along, 0.0)
        total = (total - along[:, None] * x) * inverse[:, None]
    ptrs, inside = _tile(out_ptr, rows, mask, E, BLOCK_E)
    tl.store(ptrs, total.to(out_ptr.dtype.element_ty), inside)


@triton.jit(
    do_not_specialize=[
        "stride_gq", "stride_gc", "stride_ac", "Q", "C", "Tq", "programs", "parts", "share"
    ]
)  # fmt: skip
def _maxsim_streaming_dqueries_kernel(
    grad_ptr, argmax_ptr, query_ptr, document_ptr, query_cu_ptr, order_ptr, group_ptr, dquery_ptr,
    ddocument_ptr, stride_gq, stride_gc, stride_ac, Q, C, Tq, programs, parts, share,
    E: tl.constexpr, NORMALIZE: tl.constexpr, SCATTER: tl.constexpr, PARTIAL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """BLOCK_R tokens of a query, one of the ``parts`` of its columns. SCATTER also adds the
    documents' gradients in ``ddocument``; PARTIAL leaves parts in fp32 ``dquery [parts, Tq, E]``.
    Where pairs are scored, the columns are the entries of ``order`` that belong to the query.
    """
    pid = tl.program_id(0)
    part = pid % parts
    q = pid // (programs * parts)
    start, stop, first, last = owned_rows(query_cu_ptr, q, Q, Tq)
    if order_ptr is None:
        first_c = part * share
        stop_c = tl.minimum(first_c + share, C)
    else:
        first_of_query = tl.load(group_ptr + q)
        stop_of_query = tl.load(group_ptr + q + 1)
        each = tl.cdiv(stop_of_query - first_of_query, parts)
        first_c = first_of_query + part * each
        stop_c = tl.minimum(first_c + each, stop_of_query)
        argmax_ptr -= start
    grad_ptr += q.to(tl.int64) * stride_gq
    stride_gc = stride_gc.to(tl.int64)
    stride_ac = stride_ac.to(tl.int64)
    for lo in range(first + pid // parts % programs * BLOCK_R, last, programs * BLOCK_R):
        s = lo + tl.arange(0, BLOCK_R)
        real = (s >= start) & (s < stop)
        if SCATTER:
            queries = load_rows(query_ptr, s, real, E, BLOCK_E).to(tl.float32)
            if NORMALIZE:
                queries *= inverse_row_norms(queries)[:, None]
        total = tl.zeros((BLOCK_R, BLOCK_E), tl.float32)
        for block in range(first_c, stop_c, UNROLL):
            for i in tl.static_range(UNROLL):
                inside = block + i < stop_c
                c = block + i
                if order_ptr is not None:
                    c = tl.load(order_ptr + c, inside, 0)
                winner = tl.load(argmax_ptr + c * stride_ac + s, real & inside, -1)
                g = tl.load(grad_ptr + c * stride_gc, inside, 0.0).to(tl.float32)
                documents = load_rows(document_ptr, winner, winner >= 0, E, BLOCK_E)
                documents = documents.to(tl.float32)
                if NORMALIZE:
                    documents *= inverse_row_norms(documents)[:, None]
                total += g * documents
                if SCATTER:
                    ptrs, won = _tile(ddocument_ptr, winner, winner >= 0, E, BLOCK_E)
                    tl.atomic_add(ptrs, g * queries, won, sem="relaxed")
        mask = s < last
        if dquery_ptr is not None:
            if PARTIAL:
                ptrs, inside = _tile(dquery_ptr + part.to(tl.int64) * Tq * E, s, mask, E, BLOCK_E)
                tl.store(ptrs, total, inside)
            else:
                store_gradient(dquery_ptr, query_ptr, s, mask, total, E, BLOCK_E, NORMALIZE)


@triton.jit(do_not_specialize=["T", "parts"])
def _maxsim_streaming_rows_kernel(
    partial_ptr, x_ptr, out_ptr, T, parts,
    E: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Sum fp32 ``partial [parts, T, E]`` in order and store it as gradient of ``x``."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    total = tl.zeros((BLOCK_R, BLOCK_E), tl.float32)
    for part in range(parts):
        total += load_rows(partial_ptr, rows + part * T.to(tl.int64), rows < T, E, BLOCK_E)
    store_gradient(out_ptr, x_ptr, rows, rows < T, total, E, BLOCK_E, NORMALIZE)


def check_problem(grad: Tensor, argmax: Tensor, operands: MaxSimOperands) -> None:
    """Raise ValueError unless the forward of ``operands`` returned this shape of ``argmax``."""
    if grad.shape != operands.scores_shape or argmax.shape != operands.argmax_shape:
        raise ValueError(
            f"grad and argmax must be {operands.scores_shape} and {operands.argmax_shape}, got "
            f"{tuple(grad.shape)} and {tuple(argmax.shape)}"
        )
    if operands.queries.shape[1] > LARGEST_E:
        raise ValueError(
            f"the backward holds whole embeddings of E <= {LARGEST_E}, got "
            f"E = {operands.queries.shape[1]}"
        )


def _row_constants(E: int, normalize: bool, config: StreamingBackwardConfig) -> dict[str, Any]:
    """Constants of the kernels, of one warp each, that gather or finish rows."""
    block_e = next_power_of_2(E)
    rows = max(config.row_elements // block_e, 1)
    return {"E": E, "NORMALIZE": normalize, "BLOCK_R": rows, "BLOCK_E": block_e, "num_warps": 1}


def finish_rows(
    partial: Tensor, x: Tensor, normalize: bool, config: StreamingBackwardConfig
) -> Tensor:
    """The gradient of ``x [T, E]`` from fp32 ``partial [parts, T, E]``."""
    out = torch.empty_like(x)
    _plan_rows(*x.shape, partial.shape[0], normalize, config)(partial, x, out)
    return out


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan_rows(
    T: int, E: int, parts: int, normalize: bool, config: StreamingBackwardConfig
) -> Launch:
    constants = _row_constants(E, normalize, config)
    grid = (cdiv(T, constants["BLOCK_R"]),)
    return Launch(_maxsim_streaming_rows_kernel, grid, T, parts, **constants)


def of_pairs(pairs: Tensor, side: int, count: int) -> tuple[Tensor, Tensor]:
    """The pairs of each query (side 0) or document (side 1) in a fixed order: numbers of pairs,
    int32 ``[P]``, and the boundaries between those of the ``count`` sequences, int32."""
    owners, order = pairs[:, side].sort(stable=True)
    sequences = torch.arange(count + 1, dtype=torch.int32, device=pairs.device)
    return order.int(), torch.searchsorted(owners, sequences, out_int32=True)


def gather_winners(
    grad: Tensor,
    argmax: Tensor,
    operands: MaxSimOperands,
    scatter: Tensor | None,
    *,
    normalize: bool,
    wanted: bool,
    config: StreamingBackwardConfig,
) -> Tensor | None:
    """Gradient of the queries, if wanted; adds that of the documents' embeddings as they were
    multiplied, normalised or not, in fp32 ``scatter [Td, E]``."""
    queries, documents = operands.queries.contiguous(), operands.documents.contiguous()
    query_cu = operands.query_cu_seqlens.contiguous()
    (Q, C), strides = grad.shape, grad.stride()
    order = groups = None
    if operands.pairs is not None:
        # Columns of a query are pairs; without these there would be P / Q of them.
        Q, strides = query_cu.shape[0] - 1, (0, strides[0])
        C = cdiv(grad.shape[0], Q)
        order, groups = of_pairs(operands.pairs, 0, Q)
    parts, launch = _plan_gather(
        Q, C, *queries.shape, (*strides, argmax.shape[1]), scatter is not None, normalize, config
    )
    total = None
    if wanted:
        apart = parts > 1
        shape = (parts, *queries.shape) if apart else queries.shape
        dtype = torch.float32 if apart else queries.dtype
        total = torch.empty(shape, dtype=dtype, device=queries.device)
    launch(grad, argmax, queries, documents, query_cu, order, groups, total, scatter)
    if total is None or parts == 1:
        return total
    return finish_rows(total, queries, normalize, config)


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan_gather(
    Q: int, C: int, Tq: int, E: int, strides: tuple[int, ...], scatter: bool, normalize: bool,
    config: StreamingBackwardConfig,
) -> tuple[int, Launch]:  # fmt: skip
    """How many programs share the columns of a token, and the launch."""
    constants = _row_constants(E, normalize, config)
    programs = cdiv(Tq, Q * constants["BLOCK_R"])
    parts = min(
        cdiv(C, config.columns),
        cdiv(config.programs, Q * programs),
        max(config.workspace // (4 * Tq * E), 1),
    )
    share = cdiv(C, parts)
    parts = cdiv(C, share)
    launch = Launch(
        _maxsim_streaming_dqueries_kernel, (Q * programs * parts,),
        *strides, Q, C, Tq, programs, parts, share,
        SCATTER=scatter, PARTIAL=parts > 1, UNROLL=config.unroll, **constants,
    )  # fmt: skip
    return parts, launch
