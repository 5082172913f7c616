"""MaxSim at the speed of reading the documents: reranking, documents per query, pairs.

Q queries, N documents, K documents per query, C columns of the scores (N or K), P pairs, Tq and Td
packed tokens, E embedding.

A program owns one document and the tokens of one query, or of several: the documents' tokens are
the rows of its tile of similarities and the queries' tokens the columns. The running maximum is
kept per element of the tile, so that threads talk only once, at the document's end. Documents are
read in place, each to its own length and once; queries longer than a tile read them again, from
the cache, one tile after the other or, where programs are few, side by side. The similarities never
leave the chip.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import (
    KEPT_PLANS,
    Launch,
    cdiv,
    descriptor,
    fits_descriptor,
)
from sparton.kernels.maxsim.lengths import assert_lengths, assert_pair, stated_lengths
from sparton.kernels.maxsim.operands import MaxSimOperands
from sparton.kernels.maxsim.streaming_tiles import (
    StreamingConfig,
    num_splits,
    streaming_config,
    tuned_streaming,
)
from sparton.kernels.segment_max.reduction import greater


@triton.jit
def inverse_norms(squares):
    """1 / max(|x|, 1e-12) from the sums of squares."""
    return 1.0 / tl.maximum(tl.sqrt_rn(squares), 1e-12)


@triton.jit
def _better(x, token_x, y, token_y):
    """The greater similarity with its token: the first of equals, NaN before everything."""
    stays = (x > y) | ((x == y) & (token_x < token_y)) | (x != x)
    return tl.where(stays, x, y), tl.where(stays, token_x, token_y)


@triton.jit
def _load_rows(x_ptr, rows, mask, first_e, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """``x[rows, first_e : first_e + BLOCK_E]``, zeros where masked and beyond E."""
    offs_e = first_e + tl.arange(0, BLOCK_E)
    ptrs = x_ptr + (rows[:, None] * E + offs_e[None, :])
    return tl.load(ptrs, mask[:, None] & (offs_e < E)[None, :], 0.0)


@triton.jit
def _sum_squares(x):
    x = x.to(tl.float32)
    return tl.sum(x * x, 1)


@triton.jit
def _masked(mask_ptr, rows, real):
    """``real`` without the rows that a mask, if there is one, leaves out."""
    if mask_ptr is not None:
        real = real & tl.load(mask_ptr + rows, real, 0).to(tl.int1)
    return real


@triton.jit
def _document_maxima(
    query_ptr, document_ptr, document_mask_ptr, s, real, begin, end, E: tl.constexpr,
    NORMALIZE: tl.constexpr, ARGMAX: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Maximum over the document's tokens ``begin : end`` for the query tokens ``s``, and the
    token; -inf and -1 where there is none."""
    CHUNKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    s = s.to(tl.int64)
    queries = _load_rows(query_ptr, s, real, 0, E, BLOCK_E)
    best = tl.full((BLOCK_T, s.shape[0]), float("-inf"), tl.float32)
    token = tl.full((BLOCK_T, s.shape[0]), -1, tl.int32)
    acc = tl.zeros((BLOCK_T, s.shape[0]), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    # One loop over tiles and units, so that the next tile's loads run ahead of the maximum.
    for step in range(tl.cdiv(end - begin, BLOCK_T) * CHUNKS):
        lo = begin + step // CHUNKS * BLOCK_T
        t = lo + tl.arange(0, BLOCK_T)
        e = step % CHUNKS * BLOCK_E
        if DESCRIPTORS:
            documents = document_ptr.load([lo, e])
        else:
            tile_ptr = document_ptr + lo.to(tl.int64) * E
            documents = _load_rows(tile_ptr, tl.arange(0, BLOCK_T), t < end, e, E, BLOCK_E)
        if CHUNKS > 1:
            queries = _load_rows(query_ptr, s, real, e, E, BLOCK_E)
            acc = tl.dot(documents, queries.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(documents, queries.T, input_precision="ieee")
        if NORMALIZE:
            squares += _sum_squares(documents)
        if e + BLOCK_E >= E:
            if NORMALIZE:
                acc *= inverse_norms(squares)[:, None]
            x = tl.where(_masked(document_mask_ptr, t, t < end)[:, None], acc, float("-inf"))
            if ARGMAX:
                token = tl.where(x > best, t[:, None], token)
            best = greater(best, x)
            if CHUNKS > 1:
                acc = tl.zeros_like(acc)
            squares = tl.zeros_like(squares)
    if ARGMAX:
        maximum, winner = tl.reduce((best, token), 0, _better)
    else:
        maximum = tl.reduce(best, 0, greater)
        winner = tl.full((s.shape[0],), -1, tl.int32)
    return maximum, winner


@triton.jit
def _inverse_query_norms(query_ptr, s, real, E: tl.constexpr, BLOCK_E: tl.constexpr):
    squares = tl.zeros((s.shape[0],), tl.float32)
    for e in range(0, E, BLOCK_E):
        squares += _sum_squares(_load_rows(query_ptr, s.to(tl.int64), real, e, E, BLOCK_E))
    return inverse_norms(squares)


@triton.jit
def _locate(pairs_ptr, pid, Q, C, PER_QUERY: tl.constexpr, GROUP: tl.constexpr):
    """The first query of a program, its column of scores, and its document."""
    if pairs_ptr is not None:
        first_q = tl.load(pairs_ptr + 2 * pid.to(tl.int64))
        column = pid * 0
        document = tl.load(pairs_ptr + 2 * pid.to(tl.int64) + 1)
        assert_pair(first_q, Q, document, C)
    elif PER_QUERY:
        first_q, column, document = pid // C, pid % C, pid
    else:
        # The groups that read one document run side by side.
        groups = tl.cdiv(Q, GROUP)
        first_q, column, document = pid % groups * GROUP, pid // groups, pid // groups
    return first_q, column, document


def _launch_metadata(grid: tuple, kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """For Triton's profiler: FLOPs if every token belongs to a document or query, and bytes if
    every tensor were moved once."""
    queries, documents = arguments["query_ptr"], arguments["document_ptr"]
    (Tq, E), Td, size = queries.shape, documents.shape[0], queries.element_size()
    products = Tq * Td // max(arguments["Q"], 1) if arguments["PER_QUERY"] else Tq * Td
    if arguments["pairs_ptr"] is not None:
        products = products // max(arguments["C"], 1) * arguments["pairs_ptr"].shape[0]
    results = arguments["score_ptr"].numel()
    if arguments["argmax_ptr"] is not None:
        results += arguments["argmax_ptr"].numel()
    return {
        "name": f"{kernel.name} [Tq={Tq}, Td={Td}, E={E}]",
        f"flops{8 * size}": 2 * products * E,
        "bytes": (Tq + Td) * E * size + 4 * results,
    }


# `debug` keeps assertions where there are any; overflows are not looked for.
@triton.jit(
    debug=True,
    do_not_specialize=["Q", "C", "Tq", "splits", "longest_query", "longest_document"],
    launch_metadata=_launch_metadata,
)
def _maxsim_streaming_fwd_kernel(
    query_ptr, document_ptr, query_cu_ptr, document_cu_ptr, pairs_ptr, query_mask_ptr,
    document_mask_ptr, score_ptr, argmax_ptr, Q, C, Tq, splits, longest_query, longest_document,
    E: tl.constexpr, PER_QUERY: tl.constexpr, NORMALIZE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, DESCRIPTORS: tl.constexpr,
    VERIFY: tl.constexpr,
):  # fmt: skip
    """One document and every ``splits``-th tile of the tokens of one query or a group of them;
    what these add to the scores goes to ``score [splits, Q, C]``. VERIFY: nothing has more tokens
    than the longest. Pairs have scores ``[splits, P]``, C documents and winners ``[P, Tq]``."""
    split = tl.program_id(0) % splits
    pid = tl.program_id(0) // splits
    first_q, column, document = _locate(pairs_ptr, pid, Q, C, PER_QUERY, GROUP)
    rows = tl.arange(0, GROUP * BLOCK_Q)
    if GROUP == 1:
        start = tl.load(query_cu_ptr + first_q)
        stop = tl.load(query_cu_ptr + first_q + 1)
        last = stop
        if pairs_ptr is None:
            last = tl.where(first_q == Q - 1, Tq, stop)
        longest = last - start
    else:
        q = first_q + rows // BLOCK_Q
        start = tl.load(query_cu_ptr + q, q < Q, 0)
        stop = tl.load(query_cu_ptr + q + 1, q < Q, 0)
        last = tl.where(q == Q - 1, Tq, stop)
        longest = tl.max(last - start)
    begin = tl.load(document_cu_ptr + document)
    end = tl.load(document_cu_ptr + document + 1)
    if VERIFY:
        assert_lengths(stop - start, longest_query, end - begin, longest_document)
    if argmax_ptr is not None:
        if pairs_ptr is None:
            argmax_ptr += column.to(tl.int64) * Tq
        else:
            argmax_ptr += pid.to(tl.int64) * Tq - start
    total = tl.zeros((GROUP * BLOCK_Q,), tl.float32)
    for offset in range(split * BLOCK_Q, longest, splits * BLOCK_Q):
        s = start + offset + rows % BLOCK_Q
        real = _masked(query_mask_ptr, s, s < stop)
        maximum, winner = _document_maxima(
            query_ptr, document_ptr, document_mask_ptr, s, real, begin, end,
            E, NORMALIZE, argmax_ptr is not None, BLOCK_T, BLOCK_E, DESCRIPTORS,
        )  # fmt: skip
        if NORMALIZE:
            maximum *= _inverse_query_norms(query_ptr, s, real, E, BLOCK_E)
        total += tl.where(real & (maximum != float("-inf")), maximum, 0.0)
        if argmax_ptr is not None:
            tl.store(argmax_ptr + s, tl.where(real, winner, -1), s < last)
    scores = tl.sum(tl.reshape(total, (GROUP, BLOCK_Q)), 1)
    q = first_q + tl.arange(0, GROUP)
    if pairs_ptr is None:
        score_ptr += split.to(tl.int64) * Q * C + column
        tl.store(score_ptr + q.to(tl.int64) * C, scores, q < Q)
    else:
        score_ptr += split.to(tl.int64) * (tl.num_programs(0) // splits) + pid
        tl.store(score_ptr + tl.arange(0, GROUP), scores)


def streaming_forward(
    operands: MaxSimOperands,
    *,
    normalize: bool,
    argmax: bool,
    config: StreamingConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scores and winners of every query with every document, of documents of its own, or of pairs.

    Args:
        operands: checked and flat ones; bf16, fp16 or fp32.
        normalize: L2-normalise the tokens of both sides, on the fly.
        argmax: whether the winners are wanted.
        config: how the work is cut; the winner of a search by default, or
            :func:`streaming_config`.

    Returns:
        Scores fp32 ``[Q, C]``. Winners int32 ``[C, Tq]``, the row of ``documents`` that is best for
        a query token, the first of equals; -1 where the token is masked or beyond the last query,
        or the document has no tokens; None without argmax. Scores of pairs are ``[P, 1]``, winners
        ``[P, L]``, unwritten beyond a query's tokens.
    """
    queries, documents, query_cu, document_cu, query_mask, document_mask, per_query, *_ = operands
    documents, pairs = documents.contiguous(), operands.pairs
    shape, (Tq, E) = operands.scores_shape, queries.shape
    winners = None
    if argmax:
        winners = queries.new_empty(operands.argmax_shape, dtype=torch.int32)
    config = config or tuned_streaming(operands, "forward", StreamingConfig)
    splits, block, launch = _plan(
        query_cu.shape[0] - 1, document_cu.shape[0] - 1, shape, Tq, E, queries.dtype,
        per_query is None, None if pairs is None else operands.longest_query or 0, normalize,
        fits_descriptor(documents), stated_lengths(operands), config,
    )  # fmt: skip
    scores = queries.new_empty(shape if splits == 1 else (splits, *shape), dtype=torch.float32)
    if scores.numel():
        launch(
            queries.contiguous(),
            documents if block is None else descriptor(documents, *block),
            query_cu.contiguous(), document_cu.contiguous(), pairs,
            None if query_mask is None else query_mask.contiguous(),
            None if document_mask is None else document_mask.contiguous(), scores, winners,
        )  # fmt: skip
    return scores if splits == 1 else scores.sum(0), winners


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan(
    Q: int, N: int, shape: tuple[int, int], Tq: int, E: int, dtype: torch.dtype, shared: bool,
    room: int | None, normalize: bool, fits: bool, stated: tuple[int, int] | None,
    config: StreamingConfig | None,
) -> tuple[int, tuple[int, int] | None, Launch]:  # fmt: skip
    """How many programs share a query and a document, the block of a descriptor, if the documents
    are read by one, and the launch. ``room``: of pairs, for a query's winners."""
    listed = room is not None
    cross = shared and not listed
    config = config or streaming_config(Q, Tq, E, dtype, cross=cross)
    group = config.group if cross else 1
    programs = cdiv(Q, group) * N if cross else shape[0] * shape[1]
    splits = num_splits(Q, Tq, programs, config)
    descriptors = config.descriptors and fits
    launch = Launch(
        _maxsim_streaming_fwd_kernel, (programs * splits,),
        Q, N if listed else shape[1], Tq if room is None else room, splits, *(stated or (0, 0)),
        E=E, PER_QUERY=not cross, NORMALIZE=normalize, GROUP=group,
        BLOCK_Q=config.block_q, BLOCK_T=config.block_t, BLOCK_E=config.block_e,
        DESCRIPTORS=descriptors, VERIFY=stated is not None, num_warps=config.num_warps,
        num_stages=config.num_stages, maxnreg=config.max_registers, sanitize_overflow=False,
    )  # fmt: skip
    return splits, (config.block_t, config.block_e) if descriptors else None, launch
