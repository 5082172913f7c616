"""Forward in Triton, for any CUDA GPU and for Triton's interpreter.

N sequences, T packed tokens, D hidden, V vocabulary.

A program owns BLOCK_V vocabulary rows and a group: the sequences that start within one stretch of
GROUP_TOKENS tokens. It walks over the group's tokens in tiles of BLOCK_T that ignore the
boundaries of sequences, so the matrix products follow the number of real tokens. The maximum (or
sum) of the sequence in progress is carried from tile to tile and written out where the sequence
ends.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import Launch, cdiv, descriptor
from sparton.kernels.segment_max.grouping import band_of
from sparton.kernels.segment_max.reduction import (
    clean_slots,
    locate,
    reduce_tile,
    sequences_of_group,
    summands,
    sums_of_rows,
)


class PortableConfig(NamedTuple):
    """One way to launch the kernel.

    Attributes:
        descriptors: read the operands through tensor descriptors (TMA, compute capability 9 up).
        block_v, block_t, block_d: tile of vocabulary rows, tokens and hidden units.
        segment: tokens that are searched at once for the ends of sequences.
        group_tokens: tokens that one program walks over.
        band: vocabulary tiles that run side by side, to share hidden states in the L2 cache; None:
            as many as a share of it holds.
    """

    descriptors: bool
    block_v: int
    block_t: int
    block_d: int
    num_warps: int
    num_stages: int
    segment: int = 32
    group_tokens: int = 4096
    band: int | None = None


@triton.jit
def load_tile(
    x, first_row, num_rows, first_d, ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """``x[first_row : first_row + ROWS, first_d : first_d + BLOCK_D]`` of a contiguous matrix of D
    columns, zeros beyond the edges."""
    if DESCRIPTORS:
        tile = x.load([first_row, first_d])
    else:
        rows = first_row + tl.arange(0, ROWS)
        offs_d = first_d + tl.arange(0, BLOCK_D)
        ptrs = x + rows.to(tl.int64)[:, None] * D + offs_d[None, :]
        tile = tl.load(ptrs, (rows < num_rows)[:, None] & (offs_d < D)[None, :], 0.0)
    return tile


def _launch_metadata(grid: tuple, kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """For Triton's profiler: useful FLOPs, and bytes if every tensor were moved once."""
    T, V, D = (arguments[name] for name in ("T", "V", "D"))
    size = getattr(arguments["hidden"], "base", arguments["hidden"]).element_size()
    results = arguments["reps_ptr"].numel() + arguments["argmax_ptr"].numel()
    return {
        "name": f"{kernel.name} [T={T}, D={D}, V={V}]",
        f"flops{8 * size}": 2 * T * D * V,
        "bytes": (T + V) * D * size + 4 * results,
    }


@triton.jit(
    do_not_specialize=["T", "N", "group_tokens", "num_groups", "band"],
    launch_metadata=_launch_metadata,
)
def _segment_max_kernel(
    hidden, weight, bias_ptr, cu_ptr, reps_ptr, argmax_ptr, scale_h_ptr, scale_w_ptr,
    T, N, V, group_tokens, num_groups, band,
    D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    SEGMENT: tl.constexpr, DESCRIPTORS: tl.constexpr,
    SUM: tl.constexpr, ACTIVATION: tl.constexpr, ARGMAX: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    group, block = locate(num_groups, tl.cdiv(V, BLOCK_V), band)
    first_v = block * BLOCK_V
    lanes = tl.arange(0, 128)
    first, last = sequences_of_group(cu_ptr, N, group, group_tokens, num_groups, lanes)
    if first == last:
        return
    begin = tl.load(cu_ptr + first)
    end = tl.load(cu_ptr + last)
    offs_v = first_v + tl.arange(0, BLOCK_V)
    bias = tl.zeros((BLOCK_V,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_v, offs_v < V, 0.0).to(tl.float32)
    scale = None
    if scale_w_ptr is not None:
        scale = tl.load(scale_w_ptr + offs_v, offs_v < V, 1.0)
    zeros = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    clean = clean_slots(BLOCK_V, SUM)
    state = (clean[0], clean[1], first, begin, tl.load(cu_ptr + first + 1), last)
    out = (reps_ptr, argmax_ptr, offs_v, V, sums_of_rows(offs_v, SUMMED), N)
    # One loop over tiles and hidden units: the loads of the next tile run ahead of the epilogue.
    # At least one tile, so that a group of empty sequences is written too.
    steps_per_tile: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    steps = tl.maximum(tl.cdiv(end - begin, BLOCK_T), 1) * steps_per_tile
    acc = zeros
    for step in range(steps):
        lo = begin + step // steps_per_tile * BLOCK_T
        d = step % steps_per_tile * BLOCK_D
        w = load_tile(weight, first_v, V, d, BLOCK_V, D, BLOCK_D, DESCRIPTORS)
        h = load_tile(hidden, lo, T, d, BLOCK_T, D, BLOCK_D, DESCRIPTORS)
        acc = tl.dot(w, h.T, acc, input_precision="ieee")
        if d + BLOCK_D >= D:
            x = acc
            if scale_h_ptr is not None:
                offs_t = lo + tl.arange(0, BLOCK_T)
                x = acc * tl.load(scale_h_ptr + offs_t, offs_t < T, 0.0)[None, :]
            if SUM:
                x = summands(acc, bias[:, None], ACTIVATION)
            state = reduce_tile(
                x, lo, state, clean, bias, scale, cu_ptr, out,
                SEGMENT, SUM, ACTIVATION, ARGMAX, SUMMED,
            )  # fmt: skip
            acc = zeros


def kernel_operands(hidden: Tensor, weight: Tensor, config: PortableConfig) -> tuple[Any, Any]:
    """``hidden`` and ``weight``, both contiguous, as :func:`load_tile` reads them under
    ``config``."""
    if not config.descriptors:
        return hidden, weight
    return (
        descriptor(hidden, config.block_t, config.block_d),
        descriptor(weight, config.block_v, config.block_d),
    )


def plan_portable(
    config: PortableConfig, N: int, T: int, D: int, V: int, *, size: int, device: torch.device,
    pooling: str, activation: str, argmax: bool, summed: int,
) -> Callable[..., None]:  # fmt: skip
    """As :func:`~sparton.kernels.segment_max.hopper.plan_hopper`, for operands of any float dtype
    and, without descriptors, of any width."""
    num_groups = cdiv(T, config.group_tokens)
    band = config.band or band_of(config.block_v * D * size, device)
    launch = Launch(
        _segment_max_kernel, (cdiv(V, config.block_v) * num_groups,),
        T, N, V, config.group_tokens, num_groups, band,
        D=D, BLOCK_V=config.block_v, BLOCK_T=config.block_t, BLOCK_D=config.block_d,
        SEGMENT=config.segment, DESCRIPTORS=config.descriptors,
        SUM=pooling == "sum", ACTIVATION=activation, ARGMAX=argmax, SUMMED=summed,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip

    def run(hidden: Tensor, weight: Tensor, *others: Tensor | None) -> None:
        launch(*kernel_operands(hidden, weight, config), *others)

    return run
