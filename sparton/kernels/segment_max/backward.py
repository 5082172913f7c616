"""Backward from (reps, argmax) alone; the same bits every time.

N sequences, T packed tokens, D hidden, V rows of the weight.

Only active entries, those with ``reps > 0``, carry a gradient ``g = grad * exp(-reps)``, or with a
second log1p ``g = grad * exp(-(reps + expm1(reps)))``. Without an activation all entries that have
a winner are active and ``g = grad``. Each entry moves two rows:
``g * hidden[argmax]`` to ``dweight[v]`` and ``g * weight[v]`` to ``dhidden[argmax]``. Slab by slab,
entries are listed by destination in a fixed order (see ordering.py); the program that owns a
destination row then adds them up in fp32 and stores once, in the dtype of the operand. Work follows
the number of active entries, and nothing waits for the host. Where all entries are active, the
owner of a row of the weight walks down the sequences and needs no list; then one launch sums both
gradients, unless the lists lie in the memory of one.

The rows are gathered from the L2 cache: the hidden units are cut into slices so narrow that a slice
of all rows stays there while every program of the slice runs.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.launch import cdiv, launch, next_power_of_2
from sparton.kernels.segment_max.ordering import list_by_vocabulary, vocabulary_slab
from sparton.kernels.segment_max.row_sums import (
    dhidden_kernel,
    dweight_direct_kernel,
    dweight_kernel,
    gradients_kernel,
    part_kernel,
)
from sparton.kernels.segment_max.token_lists import TokenSlab, list_by_token, token_slab

# Tokens of an ordinary sequence.
SHORT = 512
# Lists of at most this many shares are not split: it costs another launch.
FEW_SHARES, UNSPLIT = 8, 2**30
# Programs for the further shares of a sequence.
PART_PROGRAMS = 16


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
        workspace: most bytes beyond the results, unless a single row needs more. If it does not
            hold the lists by token of all sequences, these lie in the memory of ``dweight``, which
            is written after ``dhidden``, if that is larger.
    """

    chunk: int = 1024
    share: int = 512
    block_e: int = 8
    block_t: int = 4
    programs: int = 2**14
    buckets: int = 1024
    sort_warps: int = 4
    slice_bytes: int = 10 * 2**20
    workspace: int = 14 * 2**20


DEFAULT_CONFIG = BackwardConfig()


def _cut_units(x: Tensor, config: BackwardConfig) -> tuple[int, dict[str, int]]:
    """Slices of the hidden units of ``x``, and how a program of one warp reads them: LANES rows of
    128 to 512 bytes at once, 16 bytes for each lane."""
    return _cut(*x.shape, x.element_size(), config)


@functools.lru_cache(maxsize=4096)
def _cut(rows: int, D: int, size: int, config: BackwardConfig) -> tuple[int, dict[str, int]]:
    width = 512 // size
    while width > 128 // size and (D % width or rows * width * size > config.slice_bytes):
        width //= 2
    cut = {"BLOCK_E": config.block_e, "LANES": 512 // (width * size), "BLOCK_D": width}
    return cdiv(D, width), {"D": D, **cut, "num_warps": 1}


def _dweight(
    grad: Tensor, columns: Tensor | None, reps: Tensor | None, argmax: Tensor, hidden: Tensor,
    dweight: Tensor, dbias: Tensor | None, activation: str, config: BackwardConfig,
) -> None:  # fmt: skip
    N, V = argmax.shape
    slices, cut = _cut_units(hidden, config)
    if _is_direct(activation, dbias):
        launch(
            dweight_direct_kernel, (V, slices),
            grad, columns, argmax, hidden, dweight, N, V, *grad.stride(), **cut,
        )  # fmt: skip
        return
    slab = vocabulary_slab(argmax, config.workspace)
    for first in range(0, V, slab.counts.numel()):
        last = min(first + slab.counts.numel(), V)
        list_by_vocabulary(
            grad, columns, reps, argmax, slab, dbias, first, last, activation=activation
        )
        launch(dweight_kernel, (last - first, slices), *slab, hidden, dweight, first, N, **cut)


def _is_direct(activation: str, dbias: Tensor | None) -> bool:
    """Whether the owner of a row of the weight walks down the sequences, without a list."""
    return activation == "none" and dbias is None


def _num_buckets(T: int, N: int, longest: int | None, most: int) -> int:
    """A bucket for each token of the longest sequence, if it is known; else enough for sequences of
    4 times the mean length, though not above SHORT on their account."""
    mean = cdiv(T, N)
    tokens = max(mean, min(4 * mean, SHORT)) if longest is None else longest
    return min(max(next_power_of_2(tokens), 32), most)


def _token_slab(
    argmax: Tensor, hidden: Tensor, longest: int | None, lent: Tensor | None, config: BackwardConfig
) -> TokenSlab:
    (N, V), (T, D) = argmax.shape, hidden.shape
    share = config.share if FEW_SHARES * config.share < V else UNSPLIT
    return token_slab(
        argmax, D, chunk=config.chunk, share=share,
        buckets=_num_buckets(T, N, longest, config.buckets), workspace=config.workspace, lent=lent,
    )  # fmt: skip


def _dhidden(
    grad: Tensor, columns: Tensor | None, reps: Tensor | None, argmax: Tensor, hidden: Tensor,
    weight: Tensor, cu_seqlens: Tensor, slab: TokenSlab, dhidden: Tensor, dweight: Tensor | None,
    longest: int | None, activation: str, config: BackwardConfig,
) -> None:  # fmt: skip
    """Fill ``dhidden`` and, in the last launch, a ``dweight`` that needs no lists."""
    (N, V), (T, _) = argmax.shape, hidden.shape
    slices, cut = _cut_units(weight, config)
    length = max(cdiv(T, N) if longest is None else min(cdiv(T, N), longest), 1)
    block_t = min(max(slab.rows * length * slices // config.programs, 1), config.block_t)
    programs = cdiv(length, block_t)
    lists = {"BUCKETS": slab.buckets, "SHARE": slab.share, **cut}
    for first in range(0, N, slab.rows):
        last = min(first + slab.rows, N)
        list_by_token(
            grad, columns, reps, argmax, cu_seqlens, slab, first, last,
            num_warps=config.sort_warps, activation=activation,
        )  # fmt: skip
        if slab.share != UNSPLIT:
            launch(
                part_kernel, ((last - first) * PART_PROGRAMS, slices),
                slab.memory, weight, V, slab.size, PROGRAMS=PART_PROGRAMS, **lists,
            )  # fmt: skip
        tokens = (last - first) * programs
        if dweight is not None and last == N:
            row_slices, row_cut = _cut_units(hidden, config)
            launch(
                gradients_kernel, (tokens * slices + V * row_slices,),
                cu_seqlens, argmax, slab.memory, weight, dhidden, grad, columns, hidden, dweight,
                first, N, V, slab.size, programs, tokens, *grad.stride(),
                ROW_LANES=row_cut["LANES"], ROW_BLOCK_D=row_cut["BLOCK_D"], **lists,
            )  # fmt: skip
        else:
            launch(
                dhidden_kernel, (tokens, slices),
                cu_seqlens, argmax, slab.memory, weight, dhidden, first, V, slab.size, programs,
                **lists,
            )  # fmt: skip


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
        config: how the work is cut. The order of summation, hence the last bits, depend on it, but
            not on its ``workspace``.

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
    reps, columns = (None if x is None else x.contiguous() for x in (reps, columns))
    operands = (x.contiguous() for x in (argmax, hidden, weight, cu_seqlens))
    return backward_of_checked(
        grad, reps, *operands, bias_dtype=bias_dtype, need_hidden=need_hidden,
        need_weight=need_weight, activation=activation, columns=columns, longest=longest,
        config=config,
    )  # fmt: skip


def backward_of_checked(
    grad: Tensor,
    reps: Tensor | None,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    *,
    bias_dtype: torch.dtype | None = None,
    need_hidden: bool,
    need_weight: bool,
    activation: str,
    columns: Tensor | None = None,
    longest: int | None = None,
    config: BackwardConfig = DEFAULT_CONFIG,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """:func:`segment_max_backward` of operands that are known to belong together, to be contiguous
    but for ``grad``, and to lie on the current device."""
    V = weight.shape[0]
    empty = argmax.numel() == 0 or hidden.shape[0] == 0
    allocate = torch.zeros_like if empty else torch.empty_like
    dhidden = allocate(hidden) if need_hidden else None
    dweight = allocate(weight) if need_weight else None
    dbias = None
    if bias_dtype is not None:
        dbias = torch.empty(V, dtype=bias_dtype, device=weight.device)
    if empty:
        return dhidden, dweight, None if dbias is None else dbias.zero_()
    # Until dweight is written, its memory may hold the lists that dhidden is summed from.
    beside = None
    if dhidden is not None:
        slab = _token_slab(argmax, hidden, longest, dweight, config)
        if _is_direct(activation, dbias) and slab.memory is not dweight:
            beside = dweight
        _dhidden(
            grad, columns, reps, argmax, hidden, weight, cu_seqlens, slab, dhidden, beside,
            longest, activation, config,
        )  # fmt: skip
    if dweight is not None and beside is None:
        _dweight(grad, columns, reps, argmax, hidden, dweight, dbias, activation, config)
    elif dweight is None and dbias is not None:
        list_by_vocabulary(grad, columns, reps, argmax, None, dbias, 0, V, activation=activation)
    return dhidden, dweight, dbias
