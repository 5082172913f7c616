"""Backward of the SPLADE head from (reps, argmax) alone; the same bits every time.

N sequences, T packed tokens, D hidden, V vocabulary.

Only active entries, those with ``reps > 0``, carry a gradient ``g = grad * exp(-reps)``, or with a
second log1p ``g = grad * exp(-(reps + expm1(reps)))``. Each entry moves two rows:
``g * hidden[argmax]`` to ``dweight[v]`` and ``g * weight[v]`` to ``dhidden[argmax]``. Entries are
first listed by destination in a fixed order (see ordering.py); the program that owns a destination
row then adds them up in fp32 and stores once, in the dtype of the operand. Work follows the number
of active entries, and nothing waits for the host.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.splade_head.ordering import (
    ActiveEntries,
    entries_by_token,
    entries_by_vocabulary,
)


class BackwardConfig(NamedTuple):
    """How the work is cut; the sizes of blocks are powers of 2.

    Attributes:
        chunk: vocabulary entries that one program sorts by token.
        share: a token that won more entries than this is split over several programs.
        block_e: entries that a program reads at once.
    """

    chunk: int = 4096
    share: int = 2048
    block_e: int = 16


DEFAULT_CONFIG = BackwardConfig()


@triton.jit
def _sum_rows(
    first, stop, sources_ptr, g_ptr, x_ptr, offs_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Sum of ``g[e] * x[sources[e], offs_d]`` over the entries ``first : stop``, fp32."""
    acc = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for e in range(first, stop, BLOCK_E):
        offs_e = e + tl.arange(0, BLOCK_E)
        mask = offs_e < stop
        source = tl.load(sources_ptr + offs_e, mask, 0).to(tl.int64)
        g = tl.load(g_ptr + offs_e, mask, 0.0)
        ptrs = x_ptr + source[:, None] * D + offs_d[None, :]
        x = tl.load(ptrs, mask[:, None] & (offs_d < D)[None, :], 0.0)
        acc += g[:, None] * x.to(tl.float32)
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["N"])
def _dweight_kernel(
    counts_ptr, sources_ptr, g_ptr, hidden_ptr, dweight_ptr, N,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One vocabulary row, BLOCK_D of its units."""
    v = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = v * N
    stop = first + tl.load(counts_ptr + v)
    total = _sum_rows(first, stop, sources_ptr, g_ptr, hidden_ptr, offs_d, D, BLOCK_D, BLOCK_E)
    tl.store(dweight_ptr + v * D + offs_d, total.to(dweight_ptr.dtype.element_ty), offs_d < D)


@triton.jit(do_not_specialize=["T"])
def _dhidden_part_kernel(
    owner_ptr, stops_ptr, parts_ptr, sources_ptr, g_ptr, weight_ptr, partial_ptr, T,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """One further share of a token with more than SHARE entries, into a row of ``partial``."""
    part = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.load(owner_ptr + part)
    if t < T:
        before = tl.load(parts_ptr + t - 1, t > 0, 0)
        first = tl.load(stops_ptr + t - 1, t > 0, 0) + (part - before + 1) * SHARE
        stop = tl.minimum(tl.load(stops_ptr + t), first + SHARE)
        total = _sum_rows(first, stop, sources_ptr, g_ptr, weight_ptr, offs_d, D, BLOCK_D, BLOCK_E)
        tl.store(partial_ptr + part * D + offs_d, total, offs_d < D)


@triton.jit
def _dhidden_kernel(
    stops_ptr, parts_ptr, sources_ptr, g_ptr, weight_ptr, partial_ptr, dhidden_ptr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """One token, BLOCK_D of its units: its first SHARE entries, then its further shares."""
    t = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(stops_ptr + t - 1, t > 0, 0)
    stop = tl.minimum(tl.load(stops_ptr + t), first + SHARE)
    total = _sum_rows(first, stop, sources_ptr, g_ptr, weight_ptr, offs_d, D, BLOCK_D, BLOCK_E)
    for part in range(tl.load(parts_ptr + t - 1, t > 0, 0), tl.load(parts_ptr + t)):
        total += tl.load(partial_ptr + part * D + offs_d, offs_d < D, 0.0)
    tl.store(dhidden_ptr + t * D + offs_d, total.to(dhidden_ptr.dtype.element_ty), offs_d < D)


def _hidden_block(D: int) -> int:
    """Units per program: whole blocks where D allows, for full 16-byte loads."""
    whole = (block for block in (256, 128) if D % block == 0)
    return next(whole, min(triton.next_power_of_2(D), 256))


def _dweight(
    entries: ActiveEntries, hidden: Tensor, dweight: Tensor, N: int, config: BackwardConfig
) -> None:
    V, D = dweight.shape
    block_d = _hidden_block(D)
    _dweight_kernel[(V, triton.cdiv(D, block_d))](
        entries.bounds, entries.sources, entries.g, hidden, dweight, N,
        D=D, BLOCK_D=block_d, BLOCK_E=config.block_e,
    )  # fmt: skip


def _dhidden(
    entries: ActiveEntries, weight: Tensor, dhidden: Tensor, config: BackwardConfig
) -> None:
    T, D = dhidden.shape
    slices = triton.cdiv(D, block_d := _hidden_block(D))
    counts = torch.diff(entries.bounds, prepend=entries.bounds.new_zeros(1))
    parts = ((counts - 1).clamp_min(0) // config.share).cumsum(0)
    most = entries.sources.numel() // config.share
    partial = torch.empty(most, D, device=weight.device)
    if most:
        owners = torch.searchsorted(parts, torch.arange(most, device=parts.device), right=True)
        _dhidden_part_kernel[(most, slices)](
            owners, entries.bounds, parts, entries.sources, entries.g, weight, partial, T,
            D=D, BLOCK_D=block_d, BLOCK_E=config.block_e, SHARE=config.share,
        )  # fmt: skip
    _dhidden_kernel[(T, slices)](
        entries.bounds, parts, entries.sources, entries.g, weight, partial, dhidden,
        D=D, BLOCK_D=block_d, BLOCK_E=config.block_e, SHARE=config.share,
    )  # fmt: skip


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
    activation: str = "relu",
    config: BackwardConfig = DEFAULT_CONFIG,
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
        activation: of the forward.
        config: how the work is cut. The order of summation, hence the last bits, depend on it.

    Returns:
        dhidden ``[T, D]``, dweight ``[V, D]``, dbias ``[V]``, each None if not wanted. Sums run in
        fp32 in a fixed order; the results are in the dtypes of the operands.

    Raises:
        ValueError: shapes that do not belong together.
    """
    V, N = weight.shape[0], reps.shape[0]
    if not reps.shape == argmax.shape == grad.shape == (N, V):
        raise ValueError(
            f"grad, reps and argmax must all be [N, V] with V = {V}, got {tuple(grad.shape)}, "
            f"{tuple(reps.shape)}, {tuple(argmax.shape)}"
        )
    hidden, weight, grad = hidden.contiguous(), weight.contiguous(), grad.float().contiguous()
    dhidden = torch.zeros_like(hidden) if need_hidden else None
    dweight = torch.zeros_like(weight) if need_weight else None
    dbias = weight.new_zeros(V, dtype=torch.float32) if bias_dtype is not None else None
    if reps.numel() and hidden.shape[0]:
        if dweight is not None or dbias is not None:
            by_vocabulary = entries_by_vocabulary(
                grad, reps, argmax, dbias, lists=dweight is not None, activation=activation
            )
            if dweight is not None:
                _dweight(by_vocabulary, hidden, dweight, N, config)
            del by_vocabulary
        if dhidden is not None:
            by_token = entries_by_token(
                grad, reps, argmax, cu_seqlens, hidden.shape[0],
                chunk=config.chunk, activation=activation,
            )  # fmt: skip
            _dhidden(by_token, weight, dhidden, config)
    return dhidden, dweight, None if dbias is None else dbias.to(bias_dtype)
