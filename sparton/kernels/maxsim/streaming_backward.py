"""Backward of the streaming MaxSim from the winning tokens that the forward saved.

Q queries, N documents, K documents per query, C columns of the scores (N or K), P pairs, Tq and Td
packed tokens, E embedding.

With w[c, s] the winner of query token s in column c and g the gradient of its query's score:
dqueries[s] = sum over c of g[c] documents[w[c, s]], ddocuments[t] = sum over s with w[c, s] = t of
g[c] queries[s]. In `lowmem` the owner of a row sums all of it, in a fixed order, and stores it in
the operands' dtype: nothing is added in memory and repetitions give the same bits. `unified` goes
over the winners once, for both: document gradients are added with atomics in an fp32 buffer, in an
order that changes from run to run.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import KEPT_PLANS, Launch, cdiv, next_power_of_2
from sparton.kernels.maxsim.operands import MaxSimOperands
from sparton.kernels.maxsim.streaming import inverse_norms
from sparton.kernels.maxsim.streaming_rows import (
    DEFAULT_CONFIG,
    StreamingBackwardConfig,
    check_problem,
    finish_rows,
    gather_winners,
    inverse_row_norms,
    load_rows,
    of_pairs,
    owned_rows,
    store_gradient,
)
from sparton.kernels.maxsim.streaming_tiles import tuned_streaming


@triton.jit
def _add_winners(
    total, g, argmax_ptr, query_ptr, t, start, stop,
    E: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """``total + g * (sum of the query tokens start : stop that document tokens t win)``.

    Products with a matrix of zeros and ones lose nothing as long as the query tokens are exact in
    its dtype; normalised ones are multiplied as the sum of two. fp32 goes token by token.
    """
    if query_ptr.dtype.element_ty == tl.float32:
        offs_e = tl.arange(0, BLOCK_E)
        query_ptr += start.to(tl.int64) * E
        for s in range(start, stop):
            winner = tl.load(argmax_ptr + s)
            queries = tl.load(query_ptr + offs_e, (offs_e < E) & (winner >= 0), 0.0)
            query_ptr += E
            scale = g
            if NORMALIZE:
                scale *= inverse_norms(tl.sum(queries * queries, 0))
            total += tl.where(t == winner, scale, 0.0)[:, None] * queries[None, :]
    else:
        for lo in range(start, stop, BLOCK_S):
            s = lo + tl.arange(0, BLOCK_S)
            winner = tl.load(argmax_ptr + s, s < stop, -1)
            queries = load_rows(query_ptr, s, winner >= 0, E, BLOCK_E)
            wins = (t[:, None] == winner[None, :]).to(queries.dtype)
            if NORMALIZE:
                exact = queries.to(tl.float32)
                exact *= inverse_row_norms(exact)[:, None]
                queries = exact.to(queries.dtype)
                rest = tl.dot(wins, (exact - queries.to(tl.float32)).to(queries.dtype))
                total += g * tl.dot(wins, queries, rest)
            else:
                total += g * tl.dot(wins, queries)
    return total


@triton.jit(do_not_specialize=["stride_gq", "stride_gc", "Q", "N", "C", "Tq", "Td", "programs"])
def _maxsim_streaming_ddocuments_kernel(
    grad_ptr, argmax_ptr, query_ptr, document_ptr, query_cu_ptr, document_cu_ptr, pairs_ptr,
    order_ptr, group_ptr, ddocument_ptr, stride_gq, stride_gc, Q, N, C, Tq, Td, programs,
    E: tl.constexpr, PER_QUERY: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th tile of BLOCK_T tokens of one document. Of pairs, whose winners are
    ``[P, Tq]``, the document's are a part of ``order``."""
    pid = tl.program_id(0)
    document = pid // programs
    if pairs_ptr is not None:
        column = document * 0
        first_q, stop_q = tl.load(group_ptr + document), tl.load(group_ptr + document + 1)
    elif PER_QUERY:
        column, first_q = document % C, document // C
        stop_q = first_q + 1
    else:
        column, first_q, stop_q = document, document * 0, Q
    _, _, first, last = owned_rows(document_cu_ptr, document, N, Td)
    argmax_ptr += column.to(tl.int64) * Tq
    grad_ptr += column.to(tl.int64) * stride_gc
    stride_gq = stride_gq.to(tl.int64)
    for lo in range(first + pid % programs * BLOCK_T, last, programs * BLOCK_T):
        t = lo + tl.arange(0, BLOCK_T)
        total = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
        for i in range(first_q, stop_q):
            q, row, winners_ptr = i, i, argmax_ptr
            if pairs_ptr is not None:
                row = tl.load(order_ptr + i)
                q = tl.load(pairs_ptr + 2 * row.to(tl.int64))
                winners_ptr += row.to(tl.int64) * Tq - tl.load(query_cu_ptr + q)
            g = tl.load(grad_ptr + row * stride_gq).to(tl.float32)
            total = _add_winners(
                total, g, winners_ptr, query_ptr, t, tl.load(query_cu_ptr + q),
                tl.load(query_cu_ptr + q + 1), E, NORMALIZE, BLOCK_E, BLOCK_S,
            )  # fmt: skip
        store_gradient(ddocument_ptr, document_ptr, t, t < last, total, E, BLOCK_E, NORMALIZE)


def _ddocuments(
    grad: Tensor,
    argmax: Tensor,
    operands: MaxSimOperands,
    normalize: bool,
    config: StreamingBackwardConfig,
) -> Tensor:
    documents, cu_seqlens = operands.documents.contiguous(), operands.document_cu_seqlens
    (Td, E), N, pairs = documents.shape, cu_seqlens.shape[0] - 1, operands.pairs
    order, groups = (None, None) if pairs is None else of_pairs(pairs, 1, N)
    launch = _plan_ddocuments(
        *grad.shape, N, argmax.shape[1], Td, E, grad.stride(),
        operands.per_query is not None, normalize, config,
    )  # fmt: skip
    out = torch.empty_like(documents)
    launch(
        grad, argmax, operands.queries.contiguous(), documents,
        operands.query_cu_seqlens.contiguous(), cu_seqlens.contiguous(), pairs, order, groups, out,
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan_ddocuments(
    Q: int, C: int, N: int, Tq: int, Td: int, E: int, strides: tuple[int, ...], per_query: bool,
    normalize: bool, config: StreamingBackwardConfig,
) -> Launch:  # fmt: skip
    block_e = max(next_power_of_2(E), 16)
    block_t = max(config.tile_elements // block_e, 16)
    tiles = max(cdiv(Td, N * block_t), 1)
    programs = min(tiles, cdiv(config.programs, N))
    return Launch(
        _maxsim_streaming_ddocuments_kernel, (N * programs,),
        *strides, Q, N, C, Tq, Td, programs,
        E=E, PER_QUERY=per_query, NORMALIZE=normalize, BLOCK_T=block_t, BLOCK_E=block_e,
        BLOCK_S=config.block_s if block_e <= 256 else max(config.block_s // 2, 16),
        num_warps=config.tile_warps, num_stages=2,
    )  # fmt: skip


def _tuned(operands: MaxSimOperands, pass_: str) -> StreamingBackwardConfig:
    return tuned_streaming(operands, pass_, StreamingBackwardConfig) or DEFAULT_CONFIG


def streaming_backward_lowmem(
    grad: Tensor,
    argmax: Tensor,
    operands: MaxSimOperands,
    *,
    normalize: bool,
    need_queries: bool = True,
    need_documents: bool = True,
    config: StreamingBackwardConfig | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``sum(grad * scores)``; repetitions give the same bits.

    Args:
        grad: ``[Q, C]``, any strides.
        argmax: int32 ``[C, Tq]``, what the forward returned.
        operands: those of the forward.
        normalize: of the forward.
        need_queries, need_documents: whether these gradients are wanted.
        config: how the work is cut, by default as the winner of a search or DEFAULT_CONFIG says.

    Returns:
        dqueries ``[Tq, E]`` and ddocuments ``[Td, E]``, None where not wanted. Sums run in fp32;
        the results are in the dtype of the operands. Beyond them it takes at most
        ``config.workspace`` bytes or one more ``[Tq, E]``, whatever the number of documents.

    Raises:
        ValueError: shapes that the forward did not return, or E > LARGEST_E.
    """
    check_problem(grad, argmax, operands)
    queries, documents = operands.queries, operands.documents
    dqueries = ddocuments = None
    if argmax.numel() == 0 or grad.numel() == 0:
        dqueries = queries.new_zeros(queries.shape) if need_queries else None
        return dqueries, documents.new_zeros(documents.shape) if need_documents else None
    config = config or _tuned(operands, "lowmem")
    if need_queries:
        dqueries = gather_winners(
            grad, argmax, operands, None, normalize=normalize, wanted=True, config=config
        )
    if need_documents:
        ddocuments = _ddocuments(grad, argmax, operands, normalize, config)
    return dqueries, ddocuments


def streaming_backward_unified(
    grad: Tensor,
    argmax: Tensor,
    operands: MaxSimOperands,
    *,
    normalize: bool,
    need_queries: bool = True,
    need_documents: bool = True,
    config: StreamingBackwardConfig | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """:func:`streaming_backward_lowmem` in one pass over the winners: the documents' gradients are
    added with atomics in an fp32 ``[Td, E]`` and not repeatable in their last bits; the queries'
    are."""
    check_problem(grad, argmax, operands)
    if argmax.numel() == 0 or grad.numel() == 0 or not need_documents:
        return streaming_backward_lowmem(
            grad, argmax, operands, normalize=normalize, need_queries=need_queries,
            need_documents=need_documents, config=config,
        )  # fmt: skip
    config = config or _tuned(operands, "unified")
    documents = operands.documents
    total = torch.zeros(documents.shape, dtype=torch.float32, device=documents.device)
    dqueries = gather_winners(
        grad, argmax, operands, total, normalize=normalize, wanted=need_queries, config=config
    )
    if normalize or documents.dtype != torch.float32:
        total = finish_rows(total[None], documents.contiguous(), normalize, config)
    return dqueries, total
