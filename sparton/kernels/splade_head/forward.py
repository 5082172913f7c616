"""Forward of the SPLADE head: one kernel, the logits stay in registers.

N sequences, T packed tokens, D hidden, V vocabulary.

A program owns BLOCK_V vocabulary rows and a group: the sequences that start within one stretch of
GROUP_TOKENS tokens. It walks over the group's tokens in tiles of BLOCK_T that ignore the
boundaries of sequences, so the matrix products follow the number of real tokens. The maximum (or
sum) of the sequence in progress is carried from tile to tile and written out where the sequence
ends.
"""

import functools
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparton.kernels.splade_head.operands import check_operands
from sparton.kernels.splade_head.reduction import clean_slots, reduce_tile
from sparton.kernels.splade_head.tuning_cache import Regime, read_winners, regime_of


class ForwardConfig(NamedTuple):
    """One way to launch the kernel.

    Attributes:
        descriptors: read the operands through tensor descriptors (TMA, compute capability 9 up).
        block_v, block_t, block_d: tile of vocabulary rows, tokens and hidden units.
        segment: tokens that are searched at once for the ends of sequences.
        group_tokens: tokens that one program walks over.
        band: vocabulary tiles that run side by side, to share hidden states in the L2 cache.
    """

    descriptors: bool
    block_v: int
    block_t: int
    block_d: int
    num_warps: int
    num_stages: int
    segment: int = 32
    group_tokens: int = 4096
    band: int = 32


CONFIG_KINDS = (ForwardConfig,)
HOPPER = (
    ForwardConfig(True, 256, 128, 64, num_warps=8, num_stages=3),
    ForwardConfig(True, 128, 256, 64, num_warps=8, num_stages=3),
    ForwardConfig(True, 128, 128, 64, num_warps=4, num_stages=3, group_tokens=2048),
)
PORTABLE = (ForwardConfig(False, 128, 128, 32, num_warps=8, num_stages=3),)
FULL_PRECISION = (ForwardConfig(False, 64, 64, 32, num_warps=4, num_stages=2),)
HOPPER_FP8 = (
    ForwardConfig(True, 256, 128, 128, num_warps=8, num_stages=3),
    ForwardConfig(True, 128, 256, 128, num_warps=8, num_stages=3),
    ForwardConfig(True, 128, 128, 128, num_warps=4, num_stages=3, group_tokens=2048),
)
PORTABLE_FP8 = (ForwardConfig(False, 128, 128, 64, num_warps=8, num_stages=3),)


def forward_configs(
    dtype: torch.dtype, capability: tuple[int, int], hidden_size: int
) -> tuple[ForwardConfig, ...]:
    """Every configuration meant for operands of ``dtype`` and D on a GPU of this compute
    capability; the first one is used.

    On Hopper that is the tile of 256 x 128 where D > 512, else that of 128 x 128, of which two
    programs fit on a multiprocessor. Measured on an H200 in bfloat16: at D = 768 none is faster
    than the former, except for batches of nothing but short queries; at D = 384 the latter is the
    fastest. The bound lies somewhere between.
    """
    if dtype == torch.float32:
        return FULL_PRECISION
    if dtype == torch.float8_e4m3fn:
        hopper, portable = HOPPER_FP8, PORTABLE_FP8
    else:
        hopper, portable = HOPPER, PORTABLE
    if capability[0] != 9:
        return portable
    return (hopper if hidden_size > 512 else hopper[::-1]) + portable


@triton.jit
def _load_tile(
    x, first_row, num_rows, first_d, stride_row, ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """``x[first_row : first_row + ROWS, first_d : first_d + BLOCK_D]``, zeros beyond the edges."""
    if DESCRIPTORS:
        tile = x.load([first_row, first_d])
    else:
        rows = first_row + tl.arange(0, ROWS)
        offs_d = first_d + tl.arange(0, BLOCK_D)
        ptrs = x + rows.to(tl.int64)[:, None] * stride_row + offs_d[None, :]
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


@triton.jit(do_not_specialize=["T", "num_groups"], launch_metadata=_launch_metadata)
def _splade_head_fwd_kernel(
    hidden, weight, bias_ptr, cu_ptr, group_ptr, reps_ptr, argmax_ptr, scale_h_ptr, scale_w_ptr,
    T, V, num_groups, stride_ht, stride_wv,
    D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    SEGMENT: tl.constexpr, BAND: tl.constexpr, DESCRIPTORS: tl.constexpr,
    BIAS: tl.constexpr, SCALED: tl.constexpr, SUM: tl.constexpr, TWICE: tl.constexpr,
    ARGMAX: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_blocks = tl.cdiv(V, BLOCK_V)
    band = pid // (BAND * num_groups)
    width = tl.minimum(num_blocks - band * BAND, BAND)
    within = pid - band * BAND * num_groups
    group = within // width
    first_v = (band * BAND + within % width) * BLOCK_V

    first = tl.load(group_ptr + group)
    last = tl.load(group_ptr + group + 1)
    if first == last:
        return
    begin = tl.load(cu_ptr + first)
    end = tl.load(cu_ptr + last)
    offs_v = first_v + tl.arange(0, BLOCK_V)
    bias = tl.zeros((BLOCK_V,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + offs_v, offs_v < V, 0.0).to(tl.float32)
    scale = None
    if SCALED:
        scale = tl.load(scale_w_ptr + offs_v, offs_v < V, 1.0)
    clean = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    value, whole = clean_slots(BLOCK_V, SUM)
    state = (value, whole, first, begin, tl.load(cu_ptr + first + 1), last)
    # One loop over tiles and hidden units: the loads of the next tile run ahead of the epilogue.
    # At least one tile, so that a group of empty sequences is written too.
    steps_per_tile: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    steps = tl.maximum(tl.cdiv(end - begin, BLOCK_T), 1) * steps_per_tile
    acc = clean
    for step in range(steps):
        lo = begin + step // steps_per_tile * BLOCK_T
        d = step % steps_per_tile * BLOCK_D
        w = _load_tile(weight, first_v, V, d, stride_wv, BLOCK_V, D, BLOCK_D, DESCRIPTORS)
        h = _load_tile(hidden, lo, T, d, stride_ht, BLOCK_T, D, BLOCK_D, DESCRIPTORS)
        acc = tl.dot(w, h.T, acc, input_precision="ieee")
        if d + BLOCK_D >= D:
            logits = acc
            if SCALED:
                offs_t = lo + tl.arange(0, BLOCK_T)
                logits = acc * tl.load(scale_h_ptr + offs_t, offs_t < T, 0.0)[None, :]
            state = reduce_tile(
                logits, lo, state, bias, scale, cu_ptr, reps_ptr, argmax_ptr, offs_v, V,
                SEGMENT, SUM, TWICE, ARGMAX,
            )  # fmt: skip
            acc = clean


def group_bounds(cu_seqlens: Tensor, total: int, group_tokens: int) -> Tensor:
    """Sequences of each group, int32 ``[G + 1]``: group g holds those that start at tokens
    ``g * group_tokens : (g + 1) * group_tokens``. One more group than needed for ``total`` tokens
    catches the empty sequences at the very end."""
    starts = torch.arange(total // group_tokens + 2, device=cu_seqlens.device) * group_tokens
    return torch.searchsorted(cu_seqlens[:-1], starts.int(), out_int32=True)


def _fits_descriptors(*operands: Tensor) -> bool:
    """Tensor descriptors ask for 16-byte aligned rows."""
    return all(
        x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in operands
    )


@functools.cache
def tuned_configs() -> dict[Regime, ForwardConfig]:
    """Winners of searches (see tuning.py) that replace the first of :func:`forward_configs`: those
    of this process and, if the environment has SPARTON_TUNED=1, those of earlier ones."""
    return read_winners(CONFIG_KINDS) if os.environ.get("SPARTON_TUNED") == "1" else {}


def select_config(
    hidden: Tensor, weight: Tensor, num_sequences: int, *, verified: bool = True
) -> ForwardConfig:
    """The first of :func:`forward_configs` that can address the operands, or the winner of a search
    that verified this variant of the kernel."""
    capability = torch.cuda.get_device_capability(hidden.device)
    fits = _fits_descriptors(hidden, weight)
    (T, D), V = hidden.shape, weight.shape[0]
    configs = forward_configs(hidden.dtype, capability, D)
    if verified and (tuned := tuned_configs()):
        winner = tuned.get(regime_of(hidden.device, hidden.dtype, D, V, T / num_sequences))
        configs = configs if winner is None else (winner, *configs)
    return next(config for config in configs if fits or not config.descriptors)


def kernel_operands(hidden: Tensor, weight: Tensor, config: ForwardConfig) -> tuple[Any, Any]:
    """``hidden`` and ``weight`` as :func:`_load_tile` reads them under ``config``.

    Raises:
        ValueError: descriptors cannot address them.
    """
    if not config.descriptors:
        return hidden, weight
    if not _fits_descriptors(hidden, weight):
        raise ValueError(
            f"{config} needs 16-byte aligned rows, got D = {hidden.shape[1]} of {hidden.dtype}; "
            "use a configuration without descriptors"
        )
    return (
        TensorDescriptor.from_tensor(hidden, [config.block_t, config.block_d]),
        TensorDescriptor.from_tensor(weight, [config.block_v, config.block_d]),
    )


def splade_head_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    argmax: bool = True,
    pooling: str = "max",
    activation: str = "relu",
    scales: tuple[Tensor, Tensor] | None = None,
    config: ForwardConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the fused forward.

    Args:
        hidden: ``[T, D]`` float16, bfloat16 or float32.
        weight: ``[V, D]``, the same dtype.
        bias: ``[V]`` any float dtype, or None.
        cu_seqlens: int32 ``[N + 1]``, from 0 to T.
        argmax: also return the winning tokens; sum pooling has none.
        pooling: "max" or "sum".
        activation: "relu" or "log1p_relu", the latter with a second log1p.
        scales: contiguous fp32 ``[T]`` and ``[V]``, positive factors of the rows of hidden and
            weight, which may then be float8_e4m3fn, too.
        config: how to launch; by default the winner of a search for this regime (see tuning.py; for
            the maximum of relu only), or else the first fitting one of :func:`forward_configs`.

    Returns:
        reps fp32 ``[N, V]`` and the absolute token index of each maximum, int32 ``[N, V]``, or
        without argmax an empty tensor. The index may be -1 where reps is 0, and is -1 in empty
        sequences and where every logit is NaN.

    Raises:
        ValueError: operands that do not fit together, or that the descriptors of ``config``
            cannot address.
    """
    check_operands(hidden, weight, bias, cu_seqlens)
    if hidden.dtype not in (torch.float16, torch.bfloat16, torch.float32) and (
        scales is None or hidden.dtype != torch.float8_e4m3fn
    ):
        raise ValueError(f"the kernel takes float16, bfloat16 or float32, got {hidden.dtype}")
    if scales is not None and pooling != "max":
        raise ValueError(f"scales need pooling='max', got {pooling!r}")
    hidden, weight = hidden.contiguous(), weight.contiguous()
    (T, D), V, N = hidden.shape, weight.shape[0], cu_seqlens.numel() - 1
    argmax = argmax and pooling == "max"
    reps = torch.empty(N, V, device=hidden.device)
    winners = torch.empty((N, V) if argmax else 0, dtype=torch.int32, device=hidden.device)
    if reps.numel() == 0:
        return reps, winners
    if T == 0:
        return reps.zero_(), winners.fill_(-1)
    verified = (pooling, activation, scales) == ("max", "relu", None)
    config = config or select_config(hidden, weight, N, verified=verified)
    groups = group_bounds(cu_seqlens, T, config.group_tokens)
    num_groups = groups.numel() - 1
    grid = (triton.cdiv(V, config.block_v) * num_groups,)
    _splade_head_fwd_kernel[grid](
        *kernel_operands(hidden, weight, config), bias, cu_seqlens, groups, reps, winners,
        *(scales or (None, None)),
        T, V, num_groups, hidden.stride(0), weight.stride(0),
        D=D, BLOCK_V=config.block_v, BLOCK_T=config.block_t, BLOCK_D=config.block_d,
        SEGMENT=config.segment, BAND=config.band, DESCRIPTORS=config.descriptors,
        BIAS=bias is not None, SCALED=scales is not None, SUM=pooling == "sum",
        TWICE=activation == "log1p_relu", ARGMAX=argmax,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return reps, winners
