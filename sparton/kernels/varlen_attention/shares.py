"""Which sequences a program has, where it has many: as much work as others, whatever their lengths.

N sequences, H heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import Launch, multiprocessors, next_power_of_2
from sparton.kernels.varlen_attention.operands import AttentionOperands

BLOCK = 512  # sequences that are looked at at once


@triton.jit
def _lengths(cu_ptr, n, N):
    return tl.load(cu_ptr + n + 1, n < N, 0) - tl.load(cu_ptr + n, n < N, 0)


@triton.jit
def _work(queries, keys, real, SIZE: tl.constexpr):
    """About what a sequence costs: what a product of a tile and a chunk does, each tile once more,
    and the sequence twice."""
    tiles, chunks = tl.cdiv(queries, SIZE), tl.cdiv(keys, SIZE)
    return tl.where(real, tiles * (chunks + 1) + 2, 0).to(tl.int64)


# `debug` keeps the assertions; overflows are not looked for. In kernels with asynchronous products
# they would be calls, for the sake of which the compiler lets no product run behind another.
@triton.jit(debug=True, do_not_specialize=["N", "max_query", "max_key"])
def _shares_kernel(
    query_cu_ptr, key_cu_ptr, shares_ptr, N, max_query, max_key,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((), tl.int64)
    for lo in range(0, N, BLOCK):
        n = lo + tl.arange(0, BLOCK)
        queries, keys = _lengths(query_cu_ptr, n, N), _lengths(key_cu_ptr, n, N)
        tl.device_assert(queries <= max_query, "a sequence has more queries than max_query")
        tl.device_assert(keys <= max_key, "a sequence has more keys than max_key")
        total += tl.sum(_work(queries, keys, n < N, SIZE))
    group = tl.arange(0, PADDED)
    before = total * group // GROUPS  # work of the groups before
    first = tl.zeros((PADDED,), tl.int32)
    done = tl.zeros((), tl.int64)
    for lo in range(0, N, BLOCK):
        n = lo + tl.arange(0, BLOCK)
        queries, keys = _lengths(query_cu_ptr, n, N), _lengths(key_cu_ptr, n, N)
        work = _work(queries, keys, n < N, SIZE)
        until = done + tl.cumsum(work)
        theirs = (until[None, :] <= before[:, None]) & (n < N)[None, :]
        first += tl.sum(theirs.to(tl.int32), 1)
        done += tl.sum(work)
    tl.store(shares_ptr + group, first, group <= GROUPS)


def share_out(operands: AttentionOperands, size: int) -> Tensor:
    """The first sequence of each group, and N, int32 ``[groups + 1]``; also asserts the lengths.

    A group has a program for each head, and a program a multiprocessor, if there are enough.

    Args:
        size: rows of a tile, and of what it is multiplied with at once.
    """
    bounds = operands[3:5]
    device, N, H = bounds[0].device, len(bounds[0]) - 1, operands.query.shape[1]
    groups = max(multiprocessors(device) // H, 1)
    shares = torch.empty(groups + 1, dtype=torch.int32, device=device)
    Launch(
        _shares_kernel, (1,), N, operands.max_query, operands.max_key, GROUPS=groups,
        PADDED=next_power_of_2(groups + 1), SIZE=size, BLOCK=BLOCK, num_warps=8,
        sanitize_overflow=False,
    )(*bounds, shares)  # fmt: skip
    return shares
