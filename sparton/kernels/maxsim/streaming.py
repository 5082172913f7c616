"""MaxSim at the speed of reading the documents: reranking, documents per query, pairs.

Q queries, N documents, K documents per query, C columns of the scores (N or K), Tq and Td packed
tokens, E embedding.

A program owns one document and the tokens of one query, or of several: the documents' tokens are
the rows of its tile of similarities and the queries' tokens the columns. The running maximum is
kept per element of the tile, so that threads talk only once, at the document's end. Documents are
read in place, each to its own length and once; queries longer than a tile read them again, from
the cache, one tile after the other or, where programs are few, side by side. The similarities never
leave the chip.
"""

import functools
from typing import Any, NamedTuple

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
    next_power_of_2,
)
from sparton.kernels.maxsim.lengths import assert_lengths, stated_lengths
from sparton.kernels.maxsim.operands import MaxSimOperands
from sparton.kernels.segment_max.reduction import greater


class StreamingConfig(NamedTuple):
    """One way to launch the forward.

    Attributes:
        block_t: document tokens per tile.
        block_q: query tokens per tile and query.
        group: queries of a cross product that share a tile; a power of 2.
        block_e: units of an embedding that are multiplied at once. The queries stay on the chip
            where this covers E.
        max_registers: of a thread; fewer let more programs share a multiprocessor.
        descriptors: whether documents are read through a tensor descriptor (TMA), which takes fewer
            registers; where their rows are not aligned to 16 bytes they are read without.
        few_programs: where a launch would have fewer, several share the tiles of long queries.
    """

    block_t: int
    block_q: int
    group: int
    block_e: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    descriptors: bool = False
    few_programs: int = 256


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


def _launch_metadata(grid: tuple, kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """For Triton's profiler: FLOPs if every token belongs to a document or query, and bytes if
    every tensor were moved once."""
    queries, documents = arguments["query_ptr"], arguments["document_ptr"]
    (Tq, E), Td, size = queries.shape, documents.shape[0], queries.element_size()
    products = Tq * Td // max(arguments["Q"], 1) if arguments["PER_QUERY"] else Tq * Td
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
    query_ptr, document_ptr, query_cu_ptr, document_cu_ptr, query_mask_ptr,
    document_mask_ptr, score_ptr, argmax_ptr, Q, C, Tq, splits, longest_query, longest_document,
    E: tl.constexpr, PER_QUERY: tl.constexpr, NORMALIZE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, DESCRIPTORS: tl.constexpr,
    VERIFY: tl.constexpr,
):  # fmt: skip
    """One document and every ``splits``-th tile of the tokens of one query or a group of them;
    what these add to the scores goes to ``score [splits, Q, C]``. VERIFY: nothing has more tokens
    than the longest."""
    split = tl.program_id(0) % splits
    pid = tl.program_id(0) // splits
    if PER_QUERY:
        first_q, column, document = pid // C, pid % C, pid
    else:
        # The groups that read one document run side by side.
        groups = tl.cdiv(Q, GROUP)
        first_q, column, document = pid % groups * GROUP, pid // groups, pid // groups
    rows = tl.arange(0, GROUP * BLOCK_Q)
    if GROUP == 1:
        start = tl.load(query_cu_ptr + first_q)
        stop = tl.load(query_cu_ptr + first_q + 1)
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
            ptrs = argmax_ptr + column.to(tl.int64) * Tq + s
            tl.store(ptrs, tl.where(real, winner, -1), s < last)
    q = first_q + tl.arange(0, GROUP)
    score_ptr += split.to(tl.int64) * Q * C
    scores = tl.sum(tl.reshape(total, (GROUP, BLOCK_Q)), 1)
    tl.store(score_ptr + q.to(tl.int64) * C + column, scores, q < Q)


def streaming_config(
    num_queries: int, num_tokens: int, E: int, dtype: torch.dtype, *, cross: bool
) -> StreamingConfig:
    """The configuration for ``num_queries`` queries of ``num_tokens`` tokens together.

    The tile is cut for queries of the average length; longer ones take several tiles.
    """
    full_precision = dtype == torch.float32
    width = cdiv(num_tokens, max(num_queries, 1))
    block_q = min(max(next_power_of_2(width), 16), 64 if full_precision else 128)
    group = 1
    while cross and group < num_queries and 2 * group * block_q <= (64 if full_precision else 128):
        group *= 2
    if full_precision:
        return StreamingConfig(32, block_q, group, 32, num_warps=4, num_stages=3)
    block_e = min(max(next_power_of_2(E), 16), 128)
    while block_e > 64 and E % block_e and E > 128:
        block_e //= 2
    config = StreamingConfig(64, block_q, group, block_e, num_warps=8, num_stages=3)
    if group * block_q <= 32:
        config = config._replace(num_warps=4, num_stages=2 if cross else 3)
    elif group * block_q == 128:
        # Two programs share a multiprocessor.
        config = config._replace(max_registers=128)
    return config._replace(descriptors=cross)


def _splits(num_queries: int, num_tokens: int, programs: int, config: StreamingConfig) -> int:
    """Programs that share the tiles of a query of average length, where there are fewer than
    ``config.few_programs`` without."""
    width = cdiv(num_tokens, max(num_queries, 1))
    wanted = cdiv(config.few_programs, max(programs, 1))
    return max(min(cdiv(width, config.block_q), wanted), 1)


def streaming_forward(
    operands: MaxSimOperands,
    *,
    normalize: bool,
    argmax: bool,
    config: StreamingConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scores and winners of every query with every document, or with documents of its own.

    Args:
        operands: checked and flat ones; bf16, fp16 or fp32.
        normalize: L2-normalise the tokens of both sides, on the fly.
        argmax: whether the winners are wanted.
        config: how the work is cut; :func:`streaming_config` by default.

    Returns:
        Scores fp32 ``[Q, C]``. Winners int32 ``[C, Tq]``, the row of ``documents`` that is best for
        a query token, the first of equals; -1 where the token is masked or beyond the last query,
        or the document has no tokens; None without argmax.
    """
    queries, documents, query_cu, document_cu, query_mask, document_mask, per_query, *_ = operands
    documents = documents.contiguous()
    Q, C = operands.scores_shape
    (Tq, E), N = queries.shape, document_cu.shape[0] - 1
    splits, block, launch = _plan(
        Q, N, C, Tq, E, queries.dtype, per_query is None, normalize, fits_descriptor(documents),
        stated_lengths(operands), config,
    )  # fmt: skip
    shape = (Q, C) if splits == 1 else (splits, Q, C)
    scores = queries.new_empty(shape, dtype=torch.float32)
    winners = queries.new_empty((C, Tq), dtype=torch.int32) if argmax else None
    if Q and C:
        launch(
            queries.contiguous(),
            documents if block is None else descriptor(documents, *block),
            query_cu.contiguous(), document_cu.contiguous(),
            None if query_mask is None else query_mask.contiguous(),
            None if document_mask is None else document_mask.contiguous(), scores, winners,
        )  # fmt: skip
    return scores if splits == 1 else scores.sum(0), winners


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan(
    Q: int, N: int, C: int, Tq: int, E: int, dtype: torch.dtype, cross: bool, normalize: bool,
    fits: bool, stated: tuple[int, int] | None, config: StreamingConfig | None,
) -> tuple[int, tuple[int, int] | None, Launch]:  # fmt: skip
    """How many programs share a query and a document, the block of a descriptor, if the documents
    are read by one, and the launch."""
    config = config or streaming_config(Q, Tq, E, dtype, cross=cross)
    group = config.group if cross else 1
    programs = cdiv(Q, group) * N if cross else N
    splits = _splits(Q, Tq, programs, config)
    descriptors = config.descriptors and fits
    launch = Launch(
        _maxsim_streaming_fwd_kernel, (programs * splits,),
        Q, C, Tq, splits, *(stated or (0, 0)),
        E=E, PER_QUERY=not cross, NORMALIZE=normalize, GROUP=group,
        BLOCK_Q=config.block_q, BLOCK_T=config.block_t, BLOCK_E=config.block_e,
        DESCRIPTORS=descriptors, VERIFY=stated is not None, num_warps=config.num_warps,
        num_stages=config.num_stages, maxnreg=config.max_registers, sanitize_overflow=False,
    )  # fmt: skip
    return splits, (config.block_t, config.block_e) if descriptors else None, launch
