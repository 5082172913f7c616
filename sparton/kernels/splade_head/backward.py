"""Backward of the SPLADE head from (reps, argmax) alone: no atomics, the same bits every time.

N sequences, T packed tokens, D hidden, V vocabulary.

Only active entries, those with ``reps > 0``, carry a gradient ``g = grad * exp(-reps)``. Each
entry moves one row: ``g * hidden[argmax]`` to ``dweight[v]`` and ``g * weight[v]`` to
``dhidden[argmax]``. The entries are first ordered by destination, then the program that owns a
destination row adds its entries up in fp32 and stores once, in the dtype of the operand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _columns_kernel(
    grad_ptr, reps_ptr, rows_ptr, counts_ptr, dbias_ptr, N, V,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, DBIAS: tl.constexpr,
):  # fmt: skip
    """For each vocabulary entry: its active sequences in ascending order, their number, dbias."""
    offs_v = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_v = offs_v < V
    count = tl.zeros((BLOCK_V,), tl.int32)
    dbias = tl.zeros((BLOCK_V,), tl.float32)
    for first in range(0, N, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        mask = (offs_n < N)[:, None] & inside_v[None, :]
        entries = offs_n.to(tl.int64)[:, None] * V + offs_v[None, :]
        reps = tl.load(reps_ptr + entries, mask, 0.0)
        active = reps > 0
        if DBIAS:
            grad = tl.load(grad_ptr + entries, active, 0.0)
            dbias += tl.sum(tl.where(active, grad * tl.exp(-reps), 0.0), 0)
        if ROWS:
            ones = active.to(tl.int32)
            slots = count[None, :] + tl.cumsum(ones, 0) - 1
            targets = rows_ptr + offs_v[None, :] * N + slots
            tl.store(targets, tl.broadcast_to(offs_n[:, None], (BLOCK_N, BLOCK_V)), active)
            count += tl.sum(ones, 0)
    if ROWS:
        tl.store(counts_ptr + offs_v, count, inside_v)
    if DBIAS:
        tl.store(dbias_ptr + offs_v, dbias, inside_v)


@triton.jit
def _dweight_kernel(
    grad_ptr, reps_ptr, argmax_ptr, rows_ptr, counts_ptr, hidden_ptr, dweight_ptr, N, V,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One vocabulary row, BLOCK_D of its units: sum of ``g * hidden[argmax]`` over its list."""
    v = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_d = offs_d < D
    count = tl.load(counts_ptr + v)
    acc = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for first in range(0, count, BLOCK_E):
        offs_e = first + tl.arange(0, BLOCK_E)
        mask = offs_e < count
        n = tl.load(rows_ptr + v * N + offs_e, mask, 0)
        entry = n.to(tl.int64) * V + v
        token = tl.load(argmax_ptr + entry, mask, 0).to(tl.int64)
        grad = tl.load(grad_ptr + entry, mask, 0.0)
        g = grad * tl.exp(-tl.load(reps_ptr + entry, mask, 0.0))
        rows = tl.load(
            hidden_ptr + token[:, None] * D + offs_d[None, :],
            mask[:, None] & inside_d[None, :],
            0.0,
        )
        acc += g[:, None] * rows.to(tl.float32)
    total = tl.sum(acc, 0)
    tl.store(dweight_ptr + v * D + offs_d, total.to(dweight_ptr.dtype.element_ty), inside_d)


@triton.jit
def _dhidden_kernel(
    grad_ptr, reps_ptr, order_ptr, offsets_ptr, weight_ptr, dhidden_ptr, V,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One token, BLOCK_D of its units: sum of ``g * weight[v]`` over the entries it won."""
    t = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_d = offs_d < D
    start = tl.load(offsets_ptr + t)
    stop = tl.load(offsets_ptr + t + 1)
    acc = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for first in range(start, stop, BLOCK_E):
        offs_e = first + tl.arange(0, BLOCK_E)
        mask = offs_e < stop
        entry = tl.load(order_ptr + offs_e, mask, 0)
        grad = tl.load(grad_ptr + entry, mask, 0.0)
        g = grad * tl.exp(-tl.load(reps_ptr + entry, mask, 0.0))
        v = entry % V
        rows = tl.load(
            weight_ptr + v[:, None] * D + offs_d[None, :], mask[:, None] & inside_d[None, :], 0.0
        )
        acc += g[:, None] * rows.to(tl.float32)
    total = tl.sum(acc, 0)
    tl.store(dhidden_ptr + t * D + offs_d, total.to(dhidden_ptr.dtype.element_ty), inside_d)


def _order_by_token(reps: Tensor, argmax: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Flat indices of the entries, stably sorted by winning token (inactive ones last), int64
    ``[N * V]``; and where each token's entries start, ``[T + 1]``."""
    keys = torch.where(reps > 0, argmax, num_tokens).flatten()
    keys, order = torch.sort(keys, stable=True)
    tokens = torch.arange(num_tokens + 1, dtype=torch.int32, device=keys.device)
    return order, torch.searchsorted(keys, tokens)


def _hidden_block(D: int) -> int:
    return next(
        (block for block in (256, 128) if D % block == 0), min(triton.next_power_of_2(D), 256)
    )


def splade_head_backward(
    grad: Tensor,
    reps: Tensor,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    *,
    bias_dtype: torch.dtype | None,
    need_hidden: bool = True,
    need_weight: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``sum(grad * reps)``.

    Args:
        grad: upstream gradient ``[N, V]``, any strides.
        reps, argmax: what the forward returned.
        hidden: ``[T, D]``.
        weight: ``[V, D]``.
        cu_seqlens: int32 ``[N + 1]``.
        bias_dtype: dtype of the wanted bias gradient, None for no such gradient.
        need_hidden, need_weight: whether these gradients are wanted.

    Returns:
        dhidden ``[T, D]``, dweight ``[V, D]``, dbias ``[V]``, each None if not wanted. Sums run in
        fp32 in a fixed order; the results are in the dtypes of the operands.

    Raises:
        ValueError: shapes that do not belong together.
    """
    (T, D), V, N = hidden.shape, weight.shape[0], reps.shape[0]
    if not reps.shape == argmax.shape == grad.shape == (N, V):
        raise ValueError(
            f"grad, reps and argmax must all be [N, V] with V = {V}, got {tuple(grad.shape)}, "
            f"{tuple(reps.shape)}, {tuple(argmax.shape)}"
        )
    hidden, weight, grad = hidden.contiguous(), weight.contiguous(), grad.float().contiguous()
    block_d = _hidden_block(D)
    slices = triton.cdiv(D, block_d)
    dhidden = torch.zeros_like(hidden) if need_hidden else None
    dweight = torch.zeros_like(weight) if need_weight else None
    dbias = torch.zeros(V, device=reps.device) if bias_dtype is not None else None
    if reps.numel() and (need_weight or dbias is not None):
        rows = torch.empty((V, N) if need_weight else 0, dtype=torch.int32, device=reps.device)
        counts = torch.empty(V if need_weight else 0, dtype=torch.int32, device=reps.device)
        _columns_kernel[(triton.cdiv(V, 32),)](
            grad, reps, rows, counts, dbias, N, V,
            BLOCK_N=32, BLOCK_V=32, ROWS=need_weight, DBIAS=dbias is not None,
        )  # fmt: skip
        if dweight is not None:
            _dweight_kernel[(V, slices)](
                grad, reps, argmax, rows, counts, hidden, dweight, N, V,
                D=D, BLOCK_D=block_d, BLOCK_E=16,
            )  # fmt: skip
        del rows
    if dhidden is not None and reps.numel() and T:
        order, offsets = _order_by_token(reps, argmax, T)
        _dhidden_kernel[(T, slices)](
            grad, reps, order, offsets, weight, dhidden, V,
            D=D, BLOCK_D=block_d, BLOCK_E=16,
        )  # fmt: skip
    return dhidden, dweight, None if dbias is None else dbias.to(bias_dtype)
