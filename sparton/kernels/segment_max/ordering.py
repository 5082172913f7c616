"""Lists of the active entries, by the row that their gradient goes to.

N sequences, V vocabulary, R rows of a slab. This file lists by vocabulary row, token_lists.py by
token.

An entry is packed into 64 bits: the row that it reads and the gradient of its logit. Only a slab is
listed at a time, R vocabulary rows or R sequences, so that the lists stay small; there is room for
every entry to be active, so that nothing waits for the device. The order within a list is fixed,
whatever the order in which programs run: sequences ascend within a vocabulary row, vocabulary rows
ascend within a token.
"""

import triton
import triton.language as tl

from sparton.kernels.launch import Step, cdiv, plan_step
from sparton.kernels.tiles import halves

# Sequences and vocabulary rows that a program lists at once.
BLOCK_N, BLOCK_V = 128, 16
LIST_WARPS = 8


@triton.jit
def load_result(reps_ptr, argmax_ptr, offs, mask, ACTIVATION: tl.constexpr):
    """Representations, and which of these entries are active: the positive ones, or without an
    activation all that have a winner."""
    if ACTIVATION == "none":
        reps = 0.0
        active = tl.load(argmax_ptr + offs, mask, -1) >= 0
    else:
        reps = tl.load(reps_ptr + offs, mask, 0.0)
        active = reps > 0
    return reps, active


@triton.jit
def load_gradient(grad_ptr, columns_ptr, offs_v, summed, stride_gv, mask):
    """Upstream gradients of vocabulary rows, each from the column that is named, or that it shares
    with ``summed`` neighbours."""
    columns = offs_v // summed
    if columns_ptr is not None:
        columns = tl.load(columns_ptr + offs_v, mask, 0)
    return tl.load(grad_ptr + columns.to(tl.int64) * stride_gv, mask, 0.0)


@triton.jit
def pack(rows, grad, reps, ACTIVATION: tl.constexpr):
    """Entries from the rows that they read, upstream gradients and representations. And the
    gradients of the logits."""
    g = grad.to(tl.float32)
    if ACTIVATION == "log1p_relu":
        reps += tl.exp(reps) - 1.0
    if ACTIVATION != "none":
        g *= tl.exp(-reps)
    bits = g.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (rows.to(tl.int64) << 32) | bits, g


@triton.jit
def unpack(entries):
    """The rows that entries read, and the gradients of their logits."""
    g = entries.to(tl.int32).to(tl.float32, bitcast=True)
    return entries.to(tl.uint64, bitcast=True) >> 32, g


@triton.jit
def _sum_columns(x):
    """Sums of the rows of ``x``, in an order that is written here. That of ``tl.sum`` follows the
    layout that the compiler chooses, and this the strides of what was loaded."""
    if x.shape[1] > 1:
        left, right = halves(x)
        x = _sum_columns(left + right)
    return x


@triton.jit(do_not_specialize=["first_v", "last_v", "N"])
def _by_vocabulary_kernel(
    grad_ptr, columns_ptr, reps_ptr, argmax_ptr, entries_ptr, counts_ptr, dbias_ptr,
    first_v, last_v, N, V, summed, stride_gn, stride_gv,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, ACTIVATION: tl.constexpr, LISTS: tl.constexpr,
    DBIAS: tl.constexpr,
):  # fmt: skip
    """BLOCK_V vocabulary rows: walk down the sequences and append the active ones."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_v = first_v + rows
    exists = offs_v < last_v
    count = tl.zeros((BLOCK_V,), tl.int32)
    total = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for first in range(0, N, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        offs = offs_n.to(tl.int64)[:, None] * V + offs_v[None, :]
        inside = (offs_n < N)[:, None] & exists[None, :]
        reps, active = load_result(reps_ptr, argmax_ptr, offs, inside, ACTIVATION)
        grad_ptrs = grad_ptr + offs_n.to(tl.int64)[:, None] * stride_gn
        grad = load_gradient(grad_ptrs, columns_ptr, offs_v[None, :], summed, stride_gv, active)
        token = tl.load(argmax_ptr + offs, active & LISTS, 0)
        entries, g = pack(token, grad, reps, ACTIVATION)
        # A representation that is NaN is not active, and its gradient is none.
        total += tl.where(active, g, 0.0)
        if LISTS:
            ones = active.to(tl.int32)
            slots = count[None, :] + tl.cumsum(ones, 0) - 1
            tl.store(entries_ptr + rows[None, :] * N + slots, entries, active)
            count += tl.sum(ones, 0)
    if LISTS:
        tl.store(counts_ptr + rows, count, exists)
    if DBIAS:
        dbias = tl.reshape(_sum_columns(tl.trans(total)), (BLOCK_V,))
        tl.store(dbias_ptr + offs_v, dbias.to(dbias_ptr.dtype.element_ty), exists)


def slab_rows(rows: int, row_bytes: int, workspace: int) -> int:
    """How many of ``rows`` rows are listed at a time, at least one, to stay within ``workspace``
    bytes."""
    slabs = cdiv(rows, max(workspace // max(row_bytes, 1), 1))
    return cdiv(rows, slabs)


def vocabulary_rows(N: int, V: int, workspace: int) -> int:
    """R, such that entries int64 ``[R, N]`` (see :func:`unpack`; they read tokens) and their
    numbers int32 ``[R]`` take at most ``workspace`` bytes, but at least 1."""
    return slab_rows(V, 8 * N + 4, workspace)


def plan_vocabulary_listing(
    N: int,
    V: int,
    first: int,
    last: int,
    summed: int,
    strides: tuple[int, ...],
    *,
    activation: str,
    lists: bool,
    dbias: bool,
) -> Step:
    """The step that lists the active entries of the vocabulary rows ``first : last`` in ``entries``
    and ``counts`` and sums the rows' gradients in ``dbias``, or does one of both.

    Args:
        N, V: sequences and vocabulary.
        first, last: at most :func:`vocabulary_rows` where they are listed.
        summed: rows that share a column of the upstream gradient.
        strides: of that.
        activation: of the forward; without one representations are not read.
        lists, dbias: which is wanted.
    """
    return plan_step(
        _by_vocabulary_kernel, (cdiv(last - first, BLOCK_V),), first, last, N, V, summed, *strides,
        BLOCK_N=BLOCK_N, BLOCK_V=BLOCK_V, ACTIVATION=activation,
        # A product fused with an addition is not rounded: with which one would be the compiler's
        # choice, too.
        LISTS=lists, DBIAS=dbias, num_warps=LIST_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
