"""Backward from (reps, argmax) alone; the same bits every time.

N sequences, T packed tokens, D hidden, V rows of the weight.

Only active entries, those with ``reps > 0``, carry a gradient ``g = grad * exp(-reps)``, or with a
second log1p ``g = grad * exp(-(reps + expm1(reps)))``. Without an activation all entries that have
a winner are active and ``g = grad``. Each entry moves two rows:
``g * hidden[argmax]`` to ``dweight[v]`` and ``g * weight[v]`` to ``dhidden[argmax]``. Slab by slab,
entries are listed by destination in a fixed order (see ordering.py); the program that owns a
destination row then adds them up in fp32 and stores once, in the dtype of the operand. Work follows
the number of active entries, and nothing waits for the host.

The rows are gathered from the L2 cache: the hidden units are cut into slices so narrow that a slice
of all rows stays there while every program of the slice runs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.segment_max.operands import on_its_device
from sparton.kernels.segment_max.ordering import (
    bucket_shift,
    list_by_token,
    list_by_vocabulary,
    token_slab,
    unpack,
    vocabulary_slab,
)


class BackwardConfig(NamedTuple):
    """How the work is cut; the sizes of blocks are powers of 2.

    Attributes:
        chunk: vocabulary entries that one program sorts by token, from 16 to 2^15.
        share: a token that won more entries than this is split over several programs.
        block_e: rows that a thread reads at once.
        block_t: most tokens of a program, on average.
        programs: fewer tokens per program where a launch would have fewer programs than this.
        buckets: a sequence with more tokens than this is listed by groups of tokens.
        sort_warps: of the programs that sort.
        slice_bytes: most bytes of a slice of all rows, unless the narrowest has more.
        workspace: most bytes beyond the results, unless a single row needs more.
    """

    chunk: int = 4096
    share: int = 2048
    block_e: int = 8
    block_t: int = 4
    programs: int = 2**14
    buckets: int = 1024
    sort_warps: int = 8
    slice_bytes: int = 24 * 2**20
    workspace: int = 16 * 2**20


DEFAULT_CONFIG = BackwardConfig()


@triton.jit
def _sum_rows(
    first, stop, entries_ptr, x_ptr, winners_ptr, token, offs_d, D: tl.constexpr,
    BLOCK_E: tl.constexpr, LANES: tl.constexpr, BLOCK_D: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Sum of ``g * x[row, offs_d]`` over the entries ``first : stop``, fp32; if the bucket is
    SHARED with other tokens, over those that ``token`` won. A thread reads BLOCK_E rows at once."""
    total = tl.zeros((LANES, BLOCK_D), tl.float32)
    for e in range(first, stop, BLOCK_E * LANES):
        for i in tl.static_range(BLOCK_E):
            offs_e = e + i * LANES + tl.arange(0, LANES)
            mask = offs_e < stop
            row, g = unpack(tl.load(entries_ptr + offs_e, mask, 0))
            if SHARED:
                mask = mask & (tl.load(winners_ptr + row, mask, -1) == token)
                g = tl.where(mask, g, 0.0)
            ptrs = x_ptr + row[:, None] * D + offs_d[None, :]
            x = tl.load(ptrs, mask[:, None] & (offs_d < D)[None, :], 0.0)
            total += g[:, None] * x.to(tl.float32)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["first_v", "N"])
def _dweight_kernel(
    entries_ptr, counts_ptr, hidden_ptr, dweight_ptr, first_v, N,
    D: tl.constexpr, BLOCK_E: tl.constexpr, LANES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One vocabulary row, BLOCK_D of its units."""
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = _sum_rows(
        0, tl.load(counts_ptr + row), entries_ptr + row * N, hidden_ptr, counts_ptr, 0, offs_d,
        D, BLOCK_E, LANES, BLOCK_D, False,
    )  # fmt: skip
    ptrs = dweight_ptr + (first_v + row) * D + offs_d
    tl.store(ptrs, total.to(dweight_ptr.dtype.element_ty), offs_d < D)


@triton.jit
def _part_kernel(
    entries_ptr, stops_ptr, parts_ptr, partial_ptr, weight_ptr, V, further, BUCKETS: tl.constexpr,
    SHARE: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr, LANES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One further share of a token, BLOCK_D of its units."""
    row = (tl.program_id(0) // further).to(tl.int64)
    part = tl.program_id(0) % further
    stops_ptr += row * BUCKETS
    parts_ptr += row * BUCKETS
    if part < tl.load(parts_ptr + BUCKETS - 1):
        offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        parts = tl.load(parts_ptr + tl.arange(0, BUCKETS))
        bucket = tl.sum((parts <= part).to(tl.int32))
        share = part - tl.load(parts_ptr + bucket - 1, bucket > 0, 0) + 1
        first = tl.load(stops_ptr + bucket - 1, bucket > 0, 0) + share * SHARE
        stop = tl.minimum(tl.load(stops_ptr + bucket), first + SHARE)
        total = _sum_rows(
            first, stop, entries_ptr + row * V, weight_ptr, stops_ptr, 0, offs_d,
            D, BLOCK_E, LANES, BLOCK_D, False,
        )  # fmt: skip
        tl.store(partial_ptr + (row * further + part) * D + offs_d, total, offs_d < D)


@triton.jit(do_not_specialize=["first_n", "programs"])
def _dhidden_kernel(
    cu_ptr, argmax_ptr, entries_ptr, stops_ptr, parts_ptr, partial_ptr, weight_ptr, dhidden_ptr,
    first_n, V, further, programs, BUCKETS: tl.constexpr, SHARE: tl.constexpr,
    D: tl.constexpr, BLOCK_E: tl.constexpr, LANES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th token of one sequence, BLOCK_D of its units: the first share of its
    entries, then what was summed over the further ones."""
    row = (tl.program_id(0) // programs).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(cu_ptr + first_n + row).to(tl.int64)
    end = tl.load(cu_ptr + first_n + row + 1)
    shift = bucket_shift(end - begin, BUCKETS)
    winners_ptr = argmax_ptr + (first_n + row) * V
    entries_ptr += row * V
    stops_ptr += row * BUCKETS
    parts_ptr += row * BUCKETS
    partial_ptr += row * further * D
    for token in range(begin + tl.program_id(0) % programs, end, programs):
        bucket = (token - begin) >> shift
        first = tl.load(stops_ptr + bucket - 1, bucket > 0, 0)
        stop = tl.load(stops_ptr + bucket)
        total = tl.zeros((BLOCK_D,), tl.float32)
        if shift > 0:
            total += _sum_rows(
                first, stop, entries_ptr, weight_ptr, winners_ptr, token, offs_d,
                D, BLOCK_E, LANES, BLOCK_D, True,
            )  # fmt: skip
        elif first < stop:
            total += _sum_rows(
                first, tl.minimum(stop, first + SHARE), entries_ptr, weight_ptr, winners_ptr,
                token, offs_d, D, BLOCK_E, LANES, BLOCK_D, False,
            )  # fmt: skip
            if stop - first > SHARE:
                part = tl.load(parts_ptr + bucket - 1, bucket > 0, 0)
                for p in range(part, tl.load(parts_ptr + bucket)):
                    total += tl.load(partial_ptr + p * D + offs_d, offs_d < D, 0.0)
        ptrs = dhidden_ptr + token * D + offs_d
        tl.store(ptrs, total.to(dhidden_ptr.dtype.element_ty), offs_d < D)


def _cut_units(x: Tensor, config: BackwardConfig) -> tuple[int, dict[str, int]]:
    """Slices of the hidden units of ``x``, and how a program of one warp reads them: LANES rows of
    128 to 512 bytes at once, 16 bytes for each lane."""
    (rows, D), size = x.shape, x.element_size()
    width = 512 // size
    while width > 128 // size and (D % width or rows * width * size > config.slice_bytes):
        width //= 2
    cut = {"BLOCK_E": config.block_e, "LANES": 512 // (width * size), "BLOCK_D": width}
    return triton.cdiv(D, width), {"D": D, **cut, "num_warps": 1}


def _dweight(
    grad: Tensor, columns: Tensor | None, reps: Tensor | None, argmax: Tensor, hidden: Tensor,
    dweight: Tensor, dbias: Tensor | None, activation: str, config: BackwardConfig,
) -> None:  # fmt: skip
    N, V = argmax.shape
    slices, cut = _cut_units(hidden, config)
    slab = vocabulary_slab(argmax, config.workspace)
    for first in range(0, V, slab.counts.numel()):
        last = min(first + slab.counts.numel(), V)
        list_by_vocabulary(
            grad, columns, reps, argmax, slab, dbias, first, last, activation=activation
        )
        _dweight_kernel[(last - first, slices)](*slab, hidden, dweight, first, N, **cut)


def _dhidden(
    grad: Tensor, columns: Tensor | None, reps: Tensor | None, argmax: Tensor, weight: Tensor,
    cu_seqlens: Tensor, dhidden: Tensor, longest: int, activation: str, config: BackwardConfig,
) -> None:  # fmt: skip
    (N, V), (T, D) = argmax.shape, dhidden.shape
    slices, cut = _cut_units(weight, config)
    buckets = min(config.buckets, max(triton.next_power_of_2(longest), 32))
    slab = token_slab(
        argmax, D, chunk=config.chunk, share=config.share, buckets=buckets,
        workspace=config.workspace,
    )  # fmt: skip
    lists = (slab.entries, slab.stops, slab.parts, slab.partial)
    rows, further = slab.stops.shape[0], V // config.share
    length = min(triton.cdiv(T, N), longest)
    block_t = min(max(rows * length * slices // config.programs, 1), config.block_t)
    programs = triton.cdiv(length, block_t)
    cut |= {"BUCKETS": buckets, "SHARE": config.share}
    for first in range(0, N, rows):
        last = min(first + rows, N)
        list_by_token(
            grad, columns, reps, argmax, cu_seqlens, slab, first, last, chunk=config.chunk,
            share=config.share, num_warps=config.sort_warps, activation=activation,
        )  # fmt: skip
        if further:
            _part_kernel[((last - first) * further, slices)](*lists, weight, V, further, **cut)
        _dhidden_kernel[((last - first) * programs, slices)](
            cu_seqlens, argmax, *lists, weight, dhidden, first, V, further, programs, **cut
        )


@on_its_device
def segment_max_backward(
    grad: Tensor,
    reps: Tensor | None,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    *,
    bias_dtype: torch.dtype | None,
    need_hidden: bool = True,
    need_weight: bool = True,
    activation: str = "relu",
    columns: Tensor | None = None,
    longest: int | None = None,
    config: BackwardConfig = DEFAULT_CONFIG,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``sum(grad * reps)``.

    Args:
        grad: upstream gradient ``[N, V]``, any strides; with ``columns`` ``[N, Q]``.
        reps, argmax: what the forward returned, ``[N, V]``. Without an activation reps are not
            read and may be None.
        hidden: ``[T, D]``.
        weight: ``[V, D]``.
        cu_seqlens: int32 ``[N + 1]``.
        bias_dtype: dtype of the wanted bias gradient, None for no such gradient.
        need_hidden, need_weight: whether these gradients are wanted.
        activation: of the forward.
        columns: int32 ``[V]``, the column of ``grad`` that holds a row's upstream gradient, where
            several rows share one; below Q, which is not checked.
        longest: most tokens of a sequence where that is known, to cut the work more closely. The
            gradients are right whatever it says.
        config: how the work is cut. The order of summation, hence the last bits, depend on it.

    Returns:
        dhidden ``[T, D]``, dweight ``[V, D]``, dbias ``[V]``, each None if not wanted. Sums run in
        fp32 in a fixed order; the results are in the dtypes of the operands.

    Raises:
        ValueError: shapes that do not belong together.
    """
    N, V = argmax.shape[0], weight.shape[0]
    width = V if columns is None else grad.shape[-1]
    if (
        argmax.shape != (N, V)
        or grad.shape != (N, width)
        or (reps is not None and reps.shape != (N, V))
    ):
        raise ValueError(
            f"grad, reps and argmax must all be [N, V] with V = {V}, got {tuple(grad.shape)}, "
            f"{None if reps is None else tuple(reps.shape)}, {tuple(argmax.shape)}; "
            "only columns= allows grad another width"
        )
    if columns is not None and (columns.shape != (V,) or columns.dtype != torch.int32):
        raise ValueError(
            f"columns must be int32 [V] = [{V}], got {columns.dtype} {tuple(columns.shape)}"
        )
    if reps is None and activation != "none":
        raise ValueError(f"activation={activation!r} needs reps; only 'none' does without")
    hidden, weight, cu_seqlens = (x.contiguous() for x in (hidden, weight, cu_seqlens))
    argmax = argmax.contiguous()
    reps = None if reps is None else reps.contiguous()
    columns = None if columns is None else columns.contiguous()
    empty = argmax.numel() == 0 or hidden.shape[0] == 0
    allocate = torch.zeros_like if empty else torch.empty_like
    dhidden = allocate(hidden) if need_hidden else None
    dweight = allocate(weight) if need_weight else None
    dbias = None if bias_dtype is None else weight.new_zeros(V, dtype=bias_dtype)
    if empty:
        return dhidden, dweight, dbias
    if dweight is not None:
        _dweight(grad, columns, reps, argmax, hidden, dweight, dbias, activation, config)
    elif dbias is not None:
        list_by_vocabulary(grad, columns, reps, argmax, None, dbias, 0, V, activation=activation)
    if dhidden is not None:
        longest = hidden.shape[0] if longest is None else max(longest, 1)
        _dhidden(
            grad, columns, reps, argmax, weight, cu_seqlens, dhidden, longest, activation, config
        )
    return dhidden, dweight, dbias
