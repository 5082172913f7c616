"""MaxSim from hidden states: projection, normalisation and search in one kernel.

N documents, T packed hidden states, H hidden, R query tokens, E embedding.

A program owns a share of one document's tokens. It projects a tile of them, normalises it and keeps
it on the chip while all query tokens pass: each token is projected once, whatever the number of
queries. Projected tokens are stored for a backward alone. The maxima so far lie in memory, in rows
that belong to the program alone.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import KEPT_PLANS, Launch, cdiv, next_power_of_2, shared_memory
from sparton.kernels.maxsim.hidden_operands import HiddenOperands, Kept
from sparton.kernels.maxsim.normalization import divided_by
from sparton.kernels.segment_max.reduction import greater


class HiddenConfig(NamedTuple):
    """How the work is cut; blocks are powers of 2 from 16 on.

    Attributes:
        block_t: tokens that are projected at once.
        block_r: query tokens that are compared with them at once.
        block_h: hidden units of one step of the projection.
        programs: documents are shared out into about as many, where tiles and documents allow it.
        maxnreg: registers of a thread at most, or None.
    """

    block_t: int = 64
    block_r: int = 64
    block_h: int = 64
    programs: int = 640
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None


MOST_SHARES = 64
SUMMED_AT_ONCE = 8  # documents of a program that sums up shares
# By the bytes of an element, then the most units of an embedding, a power of 2. With 168 registers
# a thread, three programs share a multiprocessor of Hopper. Wide embeddings leave shared memory for
# smaller tiles, and products of fp32 leave registers for smaller ones.
CONFIGS = {
    2: {
        64: HiddenConfig(block_r=128, maxnreg=168),
        128: HiddenConfig(maxnreg=168),
        256: HiddenConfig(),
        512: HiddenConfig(block_r=32, block_h=32, num_warps=8, num_stages=2),
        1024: HiddenConfig(32, 32, 16, num_warps=8, num_stages=2),
        2048: HiddenConfig(16, 16, 16, num_warps=8, num_stages=2),
    },
    4: {
        64: HiddenConfig(),
        128: HiddenConfig(32, 32, 32),
        256: HiddenConfig(32, 64, 32, num_warps=8, num_stages=2),
        512: HiddenConfig(32, 16, 16, num_warps=8, num_stages=2),
        1024: HiddenConfig(16, 16, 16, num_warps=8, num_stages=2),
    },
}
WIDE, WIDE_BYTES = 1024, 132 * 2**10  # units, and the shared memory that they take
# Query tokens from which on, where projected tokens are stored anyway, products of them are faster.
MANY_QUERY_TOKENS = 4096


@functools.cache
def _select_config(E: int, element_size: int, device: torch.device) -> HiddenConfig | None:
    """None for embeddings that no configuration takes on this device."""
    if E > WIDE // 2 and shared_memory(device) < WIDE_BYTES:
        return None
    configs = CONFIGS[element_size]
    return configs.get(max(next_power_of_2(E), min(configs)))


def search_serves(queries: Tensor, argmax: bool) -> bool:
    """Whether to search as one kernel, or else to project all tokens first."""
    Q, L, E = queries.shape
    if argmax and Q * L >= MANY_QUERY_TOKENS:
        return False
    return _select_config(E, queries.element_size(), queries.device) is not None


@triton.jit
def _project(
    hidden_ptr, projection_ptr, bias_ptr, rows, H: tl.constexpr, E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Embeddings of BLOCK_T rows of hidden states, fp32 ``[BLOCK_T, BLOCK_E]``."""
    offs_e = tl.arange(0, BLOCK_E)
    embedding = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if bias_ptr is not None:
        embedding += tl.load(bias_ptr + offs_e, offs_e < E, 0.0).to(tl.float32)[None, :]
    for first in range(0, H, BLOCK_H):
        offs_h = first + tl.arange(0, BLOCK_H)
        inside = offs_h < H
        h = tl.load(hidden_ptr + rows[:, None] * H + offs_h[None, :], inside[None, :], 0.0)
        ptrs = projection_ptr + offs_e[:, None] * H + offs_h[None, :]
        w = tl.load(ptrs, (offs_e < E)[:, None] & inside[None, :], 0.0)
        embedding = tl.dot(h, w.T, embedding, input_precision="ieee")
    return embedding


@triton.jit
def _behind(maxima_ptr, N, R, shares):
    """Where the winners of shares lie that are still to be collected."""
    behind = maxima_ptr + shares.to(tl.int64) * N * R
    return behind.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit(do_not_specialize=["N", "shares"])
def _search_hidden_kernel(
    queries_ptr, hidden_ptr, projection_ptr, bias_ptr, cu_ptr, mask_ptr, maxima_ptr, winners_ptr,
    tokens_ptr, norms_ptr, N, R, shares,
    H: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, NORMALIZE: tl.constexpr, ARGMAX: tl.constexpr,
    COLLECT: tl.constexpr,
):  # fmt: skip
    """One share of one document's tiles: one row ``[R]`` of maxima, and one of winners with
    ARGMAX."""
    n, share = tl.program_id(0) // shares, tl.program_id(0) % shares
    begin = tl.load(cu_ptr + n)
    end = tl.load(cu_ptr + n + 1)
    tiles = tl.cdiv(end - begin, BLOCK_T)
    each = tl.cdiv(tiles, shares)
    first_tile = share * each
    offs_e = tl.arange(0, BLOCK_E)
    row = (share.to(tl.int64) * N + n) * R
    found_ptr = winners_ptr
    if COLLECT:
        found_ptr = _behind(maxima_ptr, N, R, shares)
    if first_tile >= tiles:
        for first in range(0, R, BLOCK_R):
            offs_r = first + tl.arange(0, BLOCK_R)
            nothing = tl.full((BLOCK_R,), float("-inf"), tl.float32)
            tl.store(maxima_ptr + row + offs_r, nothing, offs_r < R)
            if ARGMAX:
                tl.store(found_ptr + row + offs_r, tl.full((BLOCK_R,), -1, tl.int32), offs_r < R)
    for tile in range(first_tile, tl.minimum(first_tile + each, tiles)):
        lo = begin + tile * BLOCK_T
        # Past the document's end its last token comes again, which changes no maximum.
        offs_t = tl.minimum(tl.arange(0, BLOCK_T), end - 1 - lo)
        tile_ptr = hidden_ptr + lo.to(tl.int64) * H
        embedding = _project(
            tile_ptr, projection_ptr, bias_ptr, offs_t, H, E, BLOCK_T, BLOCK_E, BLOCK_H
        )
        if NORMALIZE:
            # Not norms_of: a root that is rounded exactly takes registers that are not left.
            norms = tl.sqrt(tl.sum(embedding * embedding, 1))
            embedding = divided_by(embedding, norms)
            if ARGMAX:
                tl.store(norms_ptr + lo + offs_t, norms)
        embedding = embedding.to(hidden_ptr.dtype.element_ty)
        if ARGMAX:
            own = tokens_ptr + lo.to(tl.int64) * E + offs_t[:, None] * E + offs_e[None, :]
            tl.store(own, embedding, (offs_e < E)[None, :])
        if mask_ptr is not None:
            taken = tl.load(mask_ptr + lo + offs_t) != 0
        # Rows of maxima change hands among the threads of the program.
        tl.debug_barrier()
        for first in range(0, R, BLOCK_R):
            offs_r = first + tl.arange(0, BLOCK_R)
            present = offs_r < R
            ptrs = tl.arange(0, BLOCK_R)[:, None] * E + offs_e[None, :]
            ptrs += queries_ptr + tl.cast(first, tl.int64) * E
            q = tl.load(ptrs, present[:, None] & (offs_e < E)[None, :], 0.0)
            similarity = tl.dot(q, embedding.T, input_precision="ieee")
            if mask_ptr is not None:
                similarity = tl.where(taken[None, :], similarity, float("-inf"))
            best = tl.reduce(similarity, 1, greater)
            if ARGMAX:
                # Cheaper than a maximum that takes its place along. Nothing is less than NaN.
                less = similarity < best[:, None]
                if mask_ptr is not None:
                    less = less | ~taken[None, :]
                place = tl.min(tl.where(less, BLOCK_T, tl.arange(0, BLOCK_T)[None, :]), 1)
                winner = tl.where(best == float("-inf"), -1, tl.minimum(lo + place, end - 1))
            # The first tile does not wait to read what nobody wrote.
            follows = tile > first_tile
            before = tl.load(maxima_ptr + row + offs_r, present & follows, float("-inf"))
            better = present & ((best > before) | (best != best) | (tile == first_tile))
            tl.store(maxima_ptr + row + offs_r, best, better)
            if ARGMAX:
                tl.store(found_ptr + row + offs_r, winner, better)


@triton.jit(do_not_specialize=["N", "R", "length", "shares"])
def _sum_shares_kernel(
    maxima_ptr, mask_ptr, scores_ptr, winners_ptr, N, R, length, shares,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, COLLECT: tl.constexpr,
):  # fmt: skip
    """One query and BLOCK_N documents. Of equal shares the first wins, whose tokens come first."""
    if COLLECT:
        found_ptr = _behind(maxima_ptr, N, R, shares)
    blocks = tl.cdiv(N, BLOCK_N)
    q = (tl.program_id(0) // blocks).to(tl.int64)
    n = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    for first in range(0, length, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        inside = (n < N)[:, None] & (s < length)[None, :]
        taken = inside
        if mask_ptr is not None:
            taken = taken & (tl.load(mask_ptr + q * length + s, s < length, 0) != 0)[None, :]
        places = n[:, None] * R + (q * length + s)[None, :]
        best = tl.full((BLOCK_N, BLOCK_S), float("-inf"), tl.float32)
        winner = tl.full((BLOCK_N, BLOCK_S), -1, tl.int32)
        for share in tl.range(shares, loop_unroll_factor=4):
            other = tl.load(maxima_ptr + share * N * R.to(tl.int64) + places, taken, float("-inf"))
            better = (other > best) | (other != other)
            best = tl.where(better, other, best)
            if COLLECT:
                token = tl.load(found_ptr + share * N * R.to(tl.int64) + places, better, -1)
                winner = tl.where(better, token, winner)
        total += tl.where(best == float("-inf"), 0.0, best)
        if COLLECT:
            tl.store(winners_ptr + places, winner, inside)
    tl.store(scores_ptr + q * N + n, tl.sum(total, 1), n < N)


def _num_shares(N: int, longest: int | None, config: HiddenConfig) -> int:
    """Shares of each of N documents; no more than have tiles where the longest is known."""
    shares = min(max(config.programs // N, 1), MOST_SHARES)
    if longest is None:
        return shares
    tiles = max(cdiv(longest, config.block_t), 1)
    return cdiv(tiles, cdiv(tiles, shares))


def search_hidden(
    operands: HiddenOperands, *, argmax: bool, config: HiddenConfig | None = None
) -> tuple[Tensor, Kept | None]:
    """Scores of every query against every document, fp32 ``[Q, N]``, and what a backward needs.

    Args:
        operands: on one GPU.
        argmax: whether a backward follows; without, None takes the place of what it needs.
        config: how to launch; by default according to the width of the embeddings.

    Raises:
        ValueError: embeddings wider than any configuration takes (see :func:`search_serves`).
    """
    queries, hidden, projection = (x.contiguous() for x in operands[:3])
    cu_seqlens, normalize = operands.cu_seqlens.contiguous(), operands.normalize
    bias, query_mask, mask = (
        None if x is None else x.contiguous()
        for x in (operands.bias, operands.query_mask, operands.mask)
    )
    (Q, L, E), (*rows, H), N = queries.shape, hidden.shape, cu_seqlens.shape[0] - 1
    R = Q * L
    scores = hidden.new_empty((Q, N), dtype=torch.float32)
    kept = None
    if argmax:
        lengths = scores.new_empty(math.prod(rows) if normalize else 0)
        kept = Kept(cu_seqlens.new_empty((N, R)), hidden.new_empty((*rows, E)), lengths)
    winners, tokens, norms = kept or (None, None, None)
    if N == 0 or R == 0:
        for x in (scores, tokens, norms):
            if x is not None:
                x.zero_()
        return scores, kept
    config = config or _select_config(E, queries.element_size(), queries.device)
    if config is None:
        raise ValueError(f"no configuration of the search takes E = {E} units; project first")
    shares = _num_shares(N, operands.longest, config)
    # Of one share the search itself leaves the winners, unless a mask takes some away.
    collect = argmax and (shares > 1 or query_mask is not None)
    maxima = scores.new_empty((1 + collect, shares, N, R))
    search, add_up = _plan_search(Q, L, N, H, E, shares, normalize, argmax, collect, config)
    search(queries, hidden, projection, bias, cu_seqlens, mask, maxima, winners, tokens, norms)
    add_up(maxima, query_mask, scores, winners)
    return scores, kept


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan_search(
    Q: int, L: int, N: int, H: int, E: int, shares: int, normalize: bool, argmax: bool,
    collect: bool, config: HiddenConfig,
) -> tuple[Launch, Launch]:  # fmt: skip
    """The search by shares, and their sum, which is to ``collect`` the winners, too."""
    R = Q * L
    search = Launch(
        _search_hidden_kernel, (N * shares,), N, R, shares,
        H=H, E=E, BLOCK_T=config.block_t, BLOCK_R=min(config.block_r, max(next_power_of_2(R), 32)),
        BLOCK_E=max(next_power_of_2(E), 16), BLOCK_H=config.block_h, NORMALIZE=normalize,
        ARGMAX=argmax, COLLECT=collect, num_warps=config.num_warps, num_stages=config.num_stages,
        maxnreg=config.maxnreg,
    )  # fmt: skip
    block_n = min(next_power_of_2(N), SUMMED_AT_ONCE)
    add_up = Launch(
        _sum_shares_kernel, (Q * cdiv(N, block_n),), N, R, L, shares,
        BLOCK_N=block_n, BLOCK_S=32, COLLECT=collect,
    )  # fmt: skip
    return search, add_up
