"""Forward on Hopper (compute capability 9.0): specialised warps, in Gluon.

N sequences, T packed tokens, D hidden, V vocabulary.

A program has the same work as one of the portable kernel: WARPGROUPS * BLOCK_V vocabulary rows and
a group of sequences, tile after tile of BLOCK_T tokens. One warp copies chunks of hidden units into
a ring of buffers (TMA). The warpgroups multiply (WGMMA), each BLOCK_V rows by the tokens that all
share, and pool the tile in their registers. Each goes at its own pace within the length of the
ring: while one pools, another keeps the tensor cores busy. Narrow rows of the vocabulary (MaxSim's
query tokens) are copied once and stay.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparton.kernels.launch import Launch, cdiv
from sparton.kernels.segment_max.grouping import group_rows
from sparton.kernels.segment_max.reduction import (
    SLOTS,
    first_slots,
    locate,
    reduce_tile,
    sequences_of_group,
    summands,
    sums_of_rows,
)
from sparton.kernels.tiles import Descriptor, copy_in, rows_layout

# Bytes for the operands' buffers: what a program can have, less its barriers and scratch.
SHARED_MEMORY = 224 * 1024
MOST_STAGES = 8


class HopperConfig(NamedTuple):
    """One way to launch the kernel.

    Attributes:
        block_v: vocabulary rows of a warpgroup.
        block_t: tokens of a tile. 64 rows by 256 tokens read less shared memory than 128 by 128:
            products of a warpgroup have 64 rows, each of which reads the tokens anew.
        num_stages: chunks that the ring of buffers holds, at least 2, as one is given back when the
            next is being multiplied; a chunk is 128 bytes of every row. More where the vocabulary
            rows stay.
        segment, band: as in the portable kernel's configuration.
        group_tokens: about how many tokens a program walks over at most; see grouping.py.
        warpgroups: 2 or 4 that multiply. FP8 products are done so soon that pooling takes longer:
            four of half the rows overlap better, though each brings a copy of the code.
    """

    block_v: int = 64
    block_t: int = 256
    num_stages: int = 4
    segment: int = 32
    group_tokens: int = 4096
    band: int | None = None
    warpgroups: int = 2

    @property
    def rows(self) -> int:
        """Vocabulary rows of a program."""
        return self.warpgroups * self.block_v

    @property
    def descriptors(self) -> bool:
        return True


class Options(NamedTuple):
    """What the warpgroups are compiled for."""

    CHUNKS: gl.constexpr
    RESIDENT: gl.constexpr
    SEGMENT: gl.constexpr
    SUM: gl.constexpr
    ACTIVATION: gl.constexpr
    ARGMAX: gl.constexpr
    SUMMED: gl.constexpr


@gluon.jit
def _produce(
    hidden, weight, first_v, begin, tiles, ring, CHUNKS: gl.constexpr, RESIDENT: gl.constexpr
):
    """Copy the next chunk of the tokens and of all warpgroups' rows as a stage falls empty; with
    RESIDENT the rows along with the first tile only."""
    h_ring, w_ring, full, empty = ring
    STAGES: gl.constexpr = h_ring.shape[0]
    BLOCK_T: gl.constexpr = hidden.block_type.shape[0]
    BLOCK_D: gl.constexpr = hidden.block_type.shape[1]
    BLOCK_V: gl.constexpr = weight.block_type.shape[0]
    DEPTH: gl.constexpr = CHUNKS if RESIDENT else STAGES
    WARPGROUPS: gl.constexpr = w_ring.shape[0] // DEPTH
    for step in range(tiles * CHUNKS):
        stage = step % STAGES
        t = begin + step // CHUNKS * BLOCK_T
        d = step % CHUNKS * BLOCK_D
        # Empty: all warpgroups have read what lay in the stage a round ago. In round 0 nothing has,
        # and a barrier of which no phase is complete lets a wait for the phase before pass.
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        bar = full.index(stage)
        rows = stage
        copied = True
        if RESIDENT:
            rows = step % CHUNKS
            copied = step < CHUNKS
        # The phase of a round is complete when one arrival, this, and so many bytes are there.
        mbarrier.expect(bar, hidden.block_type.nbytes, pred=not copied)
        weight_bytes: gl.constexpr = WARPGROUPS * weight.block_type.nbytes
        mbarrier.expect(bar, hidden.block_type.nbytes + weight_bytes, pred=copied)
        copy_in(hidden, [t, d], bar, h_ring.index(stage))
        for part in gl.static_range(WARPGROUPS):
            w = w_ring.index(part * DEPTH + rows)
            copy_in(weight, [first_v + part * BLOCK_V, d], bar, w, copied)


@gluon.jit
def _multiply(acc, step, ring, PART: gl.constexpr, CHUNKS: gl.constexpr, RESIDENT: gl.constexpr):
    """Logits of one tile, fp32 ``[BLOCK_V, BLOCK_T]``; gives every stage back once it is read.
    ``acc`` lends its registers: what they hold is not read."""
    h_ring, w_ring, full, empty = ring
    STAGES: gl.constexpr = h_ring.shape[0]
    DEPTH: gl.constexpr = CHUNKS if RESIDENT else STAGES
    for chunk in range(CHUNKS):
        stage = (step + chunk) % STAGES
        rows = stage
        if RESIDENT:
            rows = chunk
        # Full: the chunk of this round is there.
        mbarrier.wait(full.index(stage), (step + chunk) // STAGES & 1)
        w = w_ring.index(PART * DEPTH + rows)
        h = h_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(w, h, acc, use_acc=chunk > 0, is_async=True)
        # One product in flight: the one before has read its stage, which is given back. A stage of
        # which a product is in flight never is.
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((step + chunk + STAGES - 1) % STAGES), pred=chunk > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + CHUNKS - 1) % STAGES))
    return acc


@gluon.jit
def _load_vector(ptr, offs, size):
    """Zeros beyond the end, or where there is no vector."""
    if ptr is None:
        x = offs.to(gl.float32) * 0.0
    else:
        x = gl.load(ptr + offs, offs < size, 0.0).to(gl.float32)
    return x


@gluon.jit
def _consume(
    place, pointers, V, N, ring,
    PART: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Multiply and pool, tile by tile, for one part of the program's vocabulary rows."""
    SUM: gl.constexpr = OPTIONS.SUM
    first_v, first, last, begin, tiles = place
    bias_ptr, cu_ptr, reps_ptr, argmax_ptr, scale_w_ptr = pointers
    BLOCK_T: gl.constexpr = ring[0].shape[1]
    BLOCK_V: gl.constexpr = ring[1].shape[1]
    K: gl.constexpr = 256 // ring[0].dtype.primitive_bitwidth
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, K])
    # The slots take the layout of the pieces that a tile is cut into.
    value = first_slots(
        gl.full((BLOCK_V, BLOCK_T), 1.0 if SUM else float("-inf"), gl.float32, TILE)
    )
    whole = first_slots(gl.full((BLOCK_V, BLOCK_T), 0 if SUM else -1, gl.int32, TILE))
    PIECE: gl.constexpr = value.type.layout
    clean = (value, whole, gl.arange(0, SLOTS, gl.SliceLayout(0, PIECE))[None, :])
    first_v += PART * BLOCK_V
    offs_v = first_v + gl.arange(0, BLOCK_V, gl.SliceLayout(1, PIECE))
    bias = _load_vector(bias_ptr, offs_v, V)
    scale = None
    if scale_w_ptr is not None:
        scale = gl.load(scale_w_ptr + offs_v, offs_v < V, 1.0)
    state = (value, whole, first, begin, gl.load(cu_ptr + first + 1), last)
    out = (reps_ptr, argmax_ptr, offs_v, V, sums_of_rows(offs_v, OPTIONS.SUMMED), N)
    logits = gl.zeros((BLOCK_V, BLOCK_T), gl.float32, TILE)
    for tile in range(tiles):
        lo = begin + tile * BLOCK_T
        step = tile * OPTIONS.CHUNKS
        logits = _multiply(logits, step, ring, PART, OPTIONS.CHUNKS, OPTIONS.RESIDENT)
        x = logits
        if SUM:
            rows = first_v + gl.arange(0, BLOCK_V, gl.SliceLayout(1, TILE))
            x = summands(logits, _load_vector(bias_ptr, rows, V)[:, None], OPTIONS.ACTIVATION)
        state = reduce_tile(
            x, lo, state, clean, bias, scale, cu_ptr, out,
            OPTIONS.SEGMENT, SUM, OPTIONS.ACTIVATION, OPTIONS.ARGMAX, OPTIONS.SUMMED,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["N", "group_tokens", "num_groups", "band"])
def _segment_max_hopper_kernel(
    hidden, weight, bias_ptr, cu_ptr, reps_ptr, argmax_ptr, scale_w_ptr,
    N, V, group_tokens, num_groups, band,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr, WARPGROUPS: gl.constexpr,
    SEGMENT: gl.constexpr, SUM: gl.constexpr, ACTIVATION: gl.constexpr,
    ARGMAX: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    BLOCK_V: gl.constexpr = weight.block_type.shape[0]
    BLOCK_T: gl.constexpr = hidden.block_type.shape[0]
    BLOCK_D: gl.constexpr = hidden.block_type.shape[1]
    group, block = locate(num_groups, gl.cdiv(V, WARPGROUPS * BLOCK_V), band)
    first_v = block * WARPGROUPS * BLOCK_V
    lanes = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    first, last = sequences_of_group(cu_ptr, N, group, group_tokens, num_groups, lanes)
    if first < last:
        begin = gl.load(cu_ptr + first)
        # At least one tile, so that a group of empty sequences is written too.
        tiles = gl.maximum(gl.cdiv(gl.load(cu_ptr + last) - begin, BLOCK_T), 1)
        BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
        # Chunks of its rows that a warpgroup has buffers for.
        DEPTH: gl.constexpr = CHUNKS if RESIDENT else STAGES
        h_ring = gl.allocate_shared_memory(hidden.dtype, [STAGES, BLOCK_T, BLOCK_D], hidden.layout)
        w_ring = gl.allocate_shared_memory(
            weight.dtype, [WARPGROUPS * DEPTH, BLOCK_V, BLOCK_D], weight.layout
        )
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=1)
            mbarrier.init(empty.index(stage), count=WARPGROUPS)
        fence_async_shared()
        ring = (h_ring, w_ring, full, empty)
        place = (first_v, first, last, begin, tiles)
        pointers = (bias_ptr, cu_ptr, reps_ptr, argmax_ptr, scale_w_ptr)
        OPTIONS: gl.constexpr = Options(
            CHUNKS, RESIDENT, SEGMENT, SUM, ACTIVATION, ARGMAX, SUMMED,
        )  # fmt: skip
        if WARPGROUPS == 2:
            gl.warp_specialize(
                [
                    (_consume, (place, pointers, V, N, ring, gl.constexpr(0), OPTIONS)),
                    (_consume, (place, pointers, V, N, ring, gl.constexpr(1), OPTIONS)),
                    (_produce, (hidden, weight, first_v, begin, tiles, ring, CHUNKS, RESIDENT)),
                ],
                [4, 1],
                [240, 24],
            )
        else:
            gl.static_assert(WARPGROUPS == 4)
            gl.warp_specialize(
                [
                    (_consume, (place, pointers, V, N, ring, gl.constexpr(0), OPTIONS)),
                    (_consume, (place, pointers, V, N, ring, gl.constexpr(1), OPTIONS)),
                    (_consume, (place, pointers, V, N, ring, gl.constexpr(2), OPTIONS)),
                    (_consume, (place, pointers, V, N, ring, gl.constexpr(3), OPTIONS)),
                    (_produce, (hidden, weight, first_v, begin, tiles, ring, CHUNKS, RESIDENT)),
                ],
                [4, 4, 4, 1],
                [120, 120, 120, 24],
            )


def _stages(config: HopperConfig, chunks: int) -> tuple[int, bool]:
    """Stages of the ring, and whether the vocabulary rows stay: where they leave the tokens a ring
    at least as long as without."""
    room = SHARED_MEMORY // 128 - config.rows * chunks
    stages = min(room // config.block_t, MOST_STAGES)
    return (stages, True) if stages >= config.num_stages else (config.num_stages, False)


def plan_hopper(
    config: HopperConfig, N: int, T: int, D: int, V: int, *, size: int, device: torch.device,
    pooling: str, activation: str, argmax: bool, summed: int,
) -> Callable[..., None]:  # fmt: skip
    """What launches the kernel for operands of these sizes.

    Args:
        config: how to launch.
        N, T, D, V: sizes.
        size: bytes of an element of the operands, 1 or 2; their rows have whole 16 bytes.
        device: where they lie.
        pooling, activation, argmax, summed: as in forward.py.

    Returns:
        A function of contiguous tensors: hidden ``[T, D]`` and weight ``[V, D]``, along one axis or
        several; bias ``[V]`` or None; cu_seqlens int32 ``[N + 1]``; reps fp32 ``[N, V]``, or
        ``[V // summed, N]``, to be filled; winners int32 ``[N, V]``, to be filled, or empty;
        factors of the rows of hidden, None, and of the weight, fp32 ``[V]`` or None.
    """
    block_d = 128 // size
    grouping = group_rows(
        N, T, V, D * size, device,
        rows=config.rows, tile=config.block_t, most=config.group_tokens, band=config.band,
    )  # fmt: skip
    chunks = cdiv(D, block_d)
    stages, resident = _stages(config, chunks)
    launch = Launch(
        _segment_max_hopper_kernel, (cdiv(V, config.rows) * grouping.groups,), N, V, *grouping,
        CHUNKS=chunks, STAGES=stages, RESIDENT=resident, WARPGROUPS=config.warpgroups,
        SEGMENT=config.segment, SUM=pooling == "sum", ACTIVATION=activation,
        ARGMAX=argmax, SUMMED=summed, num_warps=4,
    )  # fmt: skip
    token_box, row_box = [config.block_t, block_d], [config.block_v, block_d]
    layout = rows_layout(8 * size)

    def run(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, reps: Tensor,
        winners: Tensor, scale_h: None, scale_w: Tensor | None,
    ) -> None:  # fmt: skip
        launch(
            Descriptor(hidden, (T, D), (D, 1), token_box, layout),
            Descriptor(weight, (V, D), (D, 1), row_box, layout),
            bias, cu_seqlens, reps, winners, scale_w,
        )  # fmt: skip

    return run
