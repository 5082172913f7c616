"""Sums over listed entries (see ordering.py): one program owns a row, or a share of one.

N sequences, V vocabulary, D hidden.
"""

import triton
import triton.language as tl

from sparton.kernels.segment_max.ordering import unpack
from sparton.kernels.segment_max.token_lists import bucket_shift, record


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
def dweight_kernel(
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
def _sum_winners(
    row, slice, grad_ptr, columns_ptr, argmax_ptr, hidden_ptr, dweight_ptr, N, V,
    summed, stride_gn, stride_gv, D: tl.constexpr, BLOCK_E: tl.constexpr, LANES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One vocabulary row, BLOCK_D of its units, where every entry with a winner is active."""
    row = row.to(tl.int64)
    offs_d = slice * BLOCK_D + tl.arange(0, BLOCK_D)
    column = row // summed
    if columns_ptr is not None:
        column = tl.load(columns_ptr + row).to(tl.int64)
    grad_ptr += column * stride_gv
    argmax_ptr += row
    total = tl.zeros((LANES, BLOCK_D), tl.float32)
    for n in range(0, N, BLOCK_E * LANES):
        for i in tl.static_range(BLOCK_E):
            offs_n = (n + i * LANES + tl.arange(0, LANES)).to(tl.int64)
            token = tl.load(argmax_ptr + offs_n * V, offs_n < N, -1).to(tl.int64)
            won = token >= 0
            g = tl.load(grad_ptr + offs_n * stride_gn, won, 0.0).to(tl.float32)
            ptrs = hidden_ptr + token[:, None] * D + offs_d[None, :]
            x = tl.load(ptrs, won[:, None] & (offs_d < D)[None, :], 0.0)
            total += g[:, None] * x.to(tl.float32)
    ptrs = dweight_ptr + row * D + offs_d
    tl.store(ptrs, tl.sum(total, 0).to(dweight_ptr.dtype.element_ty), offs_d < D)


@triton.jit(do_not_specialize=["N"])
def dweight_direct_kernel(
    grad_ptr, columns_ptr, argmax_ptr, hidden_ptr, dweight_ptr, N, V, summed, stride_gn,
    stride_gv, D: tl.constexpr, BLOCK_E: tl.constexpr, LANES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """See :func:`_sum_winners`."""
    _sum_winners(
        tl.program_id(0), tl.program_id(1), grad_ptr, columns_ptr, argmax_ptr, hidden_ptr,
        dweight_ptr, N, V, summed, stride_gn, stride_gv, D, BLOCK_E, LANES, BLOCK_D,
    )  # fmt: skip


@triton.jit
def part_kernel(
    memory_ptr, weight_ptr, V, size, BUCKETS: tl.constexpr, SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr, LANES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th further share of the tokens of one sequence, BLOCK_D of its units."""
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    stops_ptr, parts_ptr, room_ptr, entries_ptr = record(memory_ptr, row, size, V, BUCKETS)
    partial_ptr = room_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    num_parts = tl.load(parts_ptr + BUCKETS - 1)
    for part in range(tl.program_id(0) % PROGRAMS, num_parts, PROGRAMS):
        parts = tl.load(parts_ptr + tl.arange(0, BUCKETS))
        bucket = tl.sum((parts <= part).to(tl.int32))
        share = part - tl.load(parts_ptr + bucket - 1, bucket > 0, 0) + 1
        first = tl.load(stops_ptr + bucket - 1, bucket > 0, 0) + share * SHARE
        stop = tl.minimum(tl.load(stops_ptr + bucket), first + SHARE)
        total = _sum_rows(
            first, stop, entries_ptr, weight_ptr, stops_ptr, 0, offs_d,
            D, BLOCK_E, LANES, BLOCK_D, False,
        )  # fmt: skip
        tl.store(partial_ptr + part * D + offs_d, total, offs_d < D)


@triton.jit
def _sum_lists(
    index, slice, cu_ptr, argmax_ptr, memory_ptr, weight_ptr, dhidden_ptr, first_n, V, size,
    programs, BUCKETS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr,
    LANES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th token of one sequence, BLOCK_D of its units: the first share of its
    entries, then what was summed over the further ones."""
    row = (index // programs).to(tl.int64)
    offs_d = slice * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(cu_ptr + first_n + row).to(tl.int64)
    end = tl.load(cu_ptr + first_n + row + 1)
    shift = bucket_shift(end - begin, BUCKETS)
    winners_ptr = argmax_ptr + (first_n + row) * V
    stops_ptr, parts_ptr, room_ptr, entries_ptr = record(memory_ptr, row, size, V, BUCKETS)
    partial_ptr = room_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    for token in range(begin + index % programs, end, programs):
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


@triton.jit(do_not_specialize=["first_n", "programs"])
def dhidden_kernel(
    cu_ptr, argmax_ptr, memory_ptr, weight_ptr, dhidden_ptr, first_n, V, size, programs,
    BUCKETS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr,
    LANES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """See :func:`_sum_lists`."""
    _sum_lists(
        tl.program_id(0), tl.program_id(1), cu_ptr, argmax_ptr, memory_ptr, weight_ptr,
        dhidden_ptr, first_n, V, size, programs, BUCKETS, SHARE, D, BLOCK_E, LANES, BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_n", "N", "programs", "tokens"])
def gradients_kernel(
    cu_ptr, argmax_ptr, memory_ptr, weight_ptr, dhidden_ptr, grad_ptr, columns_ptr, hidden_ptr,
    dweight_ptr, first_n, N, V, size, programs, tokens, summed, stride_gn, stride_gv,
    BUCKETS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr,
    LANES: tl.constexpr, BLOCK_D: tl.constexpr, ROW_LANES: tl.constexpr, ROW_BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What :func:`dhidden_kernel` does, in ``tokens`` programs for each slice of its units, then
    what :func:`dweight_direct_kernel` does. Neither reads what the other writes."""
    token_programs = tokens * tl.cdiv(D, BLOCK_D)
    index = tl.program_id(0)
    if index < token_programs:
        _sum_lists(
            index % tokens, index // tokens, cu_ptr, argmax_ptr, memory_ptr, weight_ptr,
            dhidden_ptr, first_n, V, size, programs, BUCKETS, SHARE, D, BLOCK_E, LANES, BLOCK_D,
        )  # fmt: skip
    else:
        index -= token_programs
        _sum_winners(
            index % V, index // V, grad_ptr, columns_ptr, argmax_ptr, hidden_ptr, dweight_ptr,
            N, V, summed, stride_gn, stride_gv, D, BLOCK_E, ROW_LANES, ROW_BLOCK_D,
        )  # fmt: skip
