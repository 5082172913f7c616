"""Backward of sum pooling: the logits again, tile by tile, then two matrix products; no atomics.

N sequences, T packed tokens, D hidden, V vocabulary.

Every positive logit x of sequence n carries a gradient: ``grad[n, v] / (1 + x)``, and with a second
log1p that divided by ``1 + log1p(x)``. One kernel multiplies a tile of vocabulary rows with one of
tokens and turns the logits into these gradients before they leave the chip. The tile, in the dtype
of the operands, then enters the products of ``dhidden`` and ``dweight``, which are summed over
tiles in fp32. Tiles of many tokens by many vocabulary rows keep both sums' traffic low.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.launch import Launch, cdiv
from sparton.kernels.segment_max.forward import default_config, fit_descriptors
from sparton.kernels.segment_max.operands import check_operands, sequence_of_tokens
from sparton.kernels.segment_max.portable import PortableConfig, kernel_operands, load_tile
from sparton.kernels.tiles import halves

_UNIT = 64  # sizes of tiles are multiples of this, so that the products see aligned rows


class SumBackwardConfig(NamedTuple):
    """How the work is cut.

    Attributes:
        tokens: most tokens of a tile.
        logits: most logits of a tile, but for 64 vocabulary rows at least.
        launch: how to launch the kernel; by default like the forward's portable kernel, and with a
            tile of its own where descriptors address the operands.
    """

    tokens: int = 4096
    logits: int = 2**25
    launch: PortableConfig | None = None


DEFAULT_CONFIG = SumBackwardConfig()
_WITH_DESCRIPTORS = PortableConfig(True, 256, 128, 64, num_warps=8, num_stages=3)


@triton.jit
def _write_grads(
    logits, lo, state, bias, cu_ptr, grad_ptr, out_ptrs, offs_v, stop_t, stop_v, V,
    SEGMENT: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """Store the gradients of logits whose columns are tokens ``lo, lo + 1, ...``, SEGMENT at once.

    ``state`` is (sequence of token ``lo - 1``, its stop, its upstream gradient, the sum of the
    gradients so far).
    """
    if logits.shape[1] > SEGMENT:
        half: tl.constexpr = logits.shape[1] // 2
        left, right = halves(logits)
        state = _write_grads(
            left, lo, state, bias, cu_ptr, grad_ptr, out_ptrs, offs_v, stop_t, stop_v, V,
            SEGMENT, TWICE,
        )  # fmt: skip
        state = _write_grads(
            right, lo + half, state, bias, cu_ptr, grad_ptr, out_ptrs + half, offs_v, stop_t,
            stop_v, V, SEGMENT, TWICE,
        )  # fmt: skip
    else:
        n, stop, upstream, total = state
        offs_t = lo + tl.arange(0, SEGMENT)
        g = tl.broadcast_to(upstream[:, None], logits.shape)
        while stop < tl.minimum(lo + SEGMENT, stop_t):
            n += 1
            upstream = tl.load(grad_ptr + n.to(tl.int64) * V + offs_v, offs_v < stop_v, 0.0)
            g = tl.where((offs_t >= stop)[None, :], upstream[:, None], g)
            stop = tl.load(cu_ptr + n + 1)
        x = logits + bias[:, None]
        slope = 1.0 + x
        if TWICE:
            slope *= 1.0 + tl.log(tl.maximum(slope, 1.0, propagate_nan=tl.PropagateNan.ALL))
        inside = (offs_t < stop_t)[None, :]
        g = tl.where((x <= 0.0) | ~inside, 0.0, g / slope)
        ptrs = out_ptrs[:, None] + tl.arange(0, SEGMENT)[None, :]
        tl.store(ptrs, g.to(out_ptrs.dtype.element_ty), (offs_v < stop_v)[:, None] & inside)
        state = (n, stop, upstream, total + tl.sum(g, 1))
    return state


@triton.jit(do_not_specialize=["first_t", "stop_t", "first_v", "stop_v"])
def _logit_grads_kernel(
    hidden, weight, bias_ptr, cu_ptr, sequence_ptr, grad_ptr, out_ptr, sums_ptr,
    first_t, stop_t, first_v, stop_v, V, stride_ov,
    D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    SEGMENT: tl.constexpr, DESCRIPTORS: tl.constexpr, TWICE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """BLOCK_V vocabulary rows by BLOCK_T tokens of a tile; with SUMS also their sums over the
    tokens."""
    block_v, block_t = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    low_v, lo = first_v + tl.program_id(0) * BLOCK_V, first_t + tl.program_id(1) * BLOCK_T
    acc = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    for d in range(0, D, BLOCK_D):
        w = load_tile(weight, low_v, stop_v, d, BLOCK_V, D, BLOCK_D, DESCRIPTORS)
        h = load_tile(hidden, lo, stop_t, d, BLOCK_T, D, BLOCK_D, DESCRIPTORS)
        acc = tl.dot(w, h.T, acc, input_precision="ieee")

    rows = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_v = first_v + rows
    bias = tl.zeros((BLOCK_V,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_v, offs_v < stop_v, 0.0).to(tl.float32)
    n = tl.load(sequence_ptr + lo)
    upstream = tl.load(grad_ptr + n.to(tl.int64) * V + offs_v, offs_v < stop_v, 0.0)
    state = (n, tl.load(cu_ptr + n + 1), upstream, tl.zeros((BLOCK_V,), tl.float32))
    state = _write_grads(
        acc, lo, state, bias, cu_ptr, grad_ptr, out_ptr + rows * stride_ov + block_t * BLOCK_T,
        offs_v, stop_t, stop_v, V, SEGMENT, TWICE,
    )  # fmt: skip
    if SUMS:
        tl.store(sums_ptr + block_t * (stop_v - first_v) + rows, state[3], offs_v < stop_v)


class _Problem(NamedTuple):
    """What the kernel needs besides a tile."""

    grad: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    cu_seqlens: Tensor
    sequences: Tensor
    activation: str
    launch: PortableConfig


def _logit_grads(problem: _Problem, t: slice, v: slice, out: Tensor, dbias: Tensor | None) -> None:
    """Write the gradients of the logits of vocabulary ``v`` and tokens ``t`` to ``out``, and add
    their sums over the tokens to ``dbias``."""
    hidden, weight, config = problem.hidden, problem.weight, problem.launch
    (width, tokens), D = out.shape, weight.shape[1]
    grid = (cdiv(width, config.block_v), cdiv(tokens, config.block_t))
    sums = (
        None
        if dbias is None
        else torch.empty(grid[1], width, dtype=torch.float32, device=out.device)
    )
    Launch(
        _logit_grads_kernel, grid,
        t.start, t.stop, v.start, v.stop, len(weight), out.stride(0),
        D=D, BLOCK_V=config.block_v, BLOCK_T=config.block_t, BLOCK_D=config.block_d,
        SEGMENT=config.segment, DESCRIPTORS=config.descriptors,
        TWICE=problem.activation == "log1p_relu", SUMS=sums is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )(
        *kernel_operands(hidden, weight, config),
        problem.bias, problem.cu_seqlens, problem.sequences, problem.grad, out, sums,
    )  # fmt: skip
    if dbias is not None and sums is not None:
        dbias[v] += sums.sum(0)


def _tiles(total: int, most: int) -> list[slice]:
    """``total`` rows in tiles of like size, multiples of _UNIT, at most ``most`` if that is one."""
    tiles = cdiv(total, max(most // _UNIT, 1) * _UNIT)
    size = cdiv(total, tiles * _UNIT) * _UNIT
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, in the fp32 of ``total``."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _default_launch(hidden: Tensor, weight: Tensor) -> PortableConfig:
    fits = fit_descriptors(hidden, weight)
    like = default_config(hidden.dtype, hidden.device, fits, "max", "relu", False, portable=True)
    assert isinstance(like, PortableConfig)
    return _WITH_DESCRIPTORS if like.descriptors else like


def _walk(
    problem: _Problem,
    dhidden: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    config: SumBackwardConfig,
) -> None:
    """Add everything up; ``dweight`` and ``dbias`` are fp32."""
    hidden, weight = problem.hidden, problem.weight
    (T, D), V = hidden.shape, weight.shape[0]
    rows = _tiles(T, config.tokens)
    stride = cdiv(rows[0].stop, _UNIT) * _UNIT
    columns = _tiles(V, config.logits // stride)
    # Products read whole vectors, and with them the ends of rows that no token fills.
    buffer = hidden.new_zeros(columns[0].stop, stride)
    for t in rows:
        total = torch.zeros(t.stop - t.start, D, dtype=torch.float32, device=hidden.device)
        for v in columns:
            g = buffer[: v.stop - v.start, : t.stop - t.start]
            _logit_grads(problem, t, v, g, dbias)
            if dweight is not None:
                _add_product(dweight[v], g, hidden[t])
            if dhidden is not None:
                _add_product(total, g.T, weight[v])
        if dhidden is not None:
            dhidden[t] = total


@on_its_device
def splade_head_sum_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str = "relu",
    need_hidden: bool = True,
    need_weight: bool = True,
    need_bias: bool = True,
    *,
    config: SumBackwardConfig = DEFAULT_CONFIG,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``sum(grad * reps)`` for sum pooling.

    Memory beyond the results: a tile, and the fp32 sums of dweight and of a tile's dhidden.

    Args:
        grad: upstream gradient ``[N, V]``, any strides.
        hidden: ``[T, D]`` float16, bfloat16 or float32.
        weight: ``[V, D]``, the same dtype.
        bias: ``[V]`` any float dtype, or None.
        cu_seqlens: int32 ``[N + 1]``.
        activation: of the forward.
        need_hidden, need_weight, need_bias: whether these gradients are wanted.
        config: how the work is cut. The order of summation, hence the last bits, depend on it.

    Returns:
        dhidden ``[T, D]``, dweight ``[V, D]``, dbias ``[V]`` in the dtypes of the operands, each
        None if not wanted. The same bits every time.

    Raises:
        ValueError: shapes that do not belong together.
    """
    check_operands(hidden, weight, bias, cu_seqlens)
    T, V = hidden.shape[0], weight.shape[0]
    if grad.shape != (cu_seqlens.numel() - 1, V):
        raise ValueError(
            f"grad must be [N, V] = [{cu_seqlens.numel() - 1}, {V}], got {tuple(grad.shape)}"
        )
    hidden, weight, cu_seqlens = (x.contiguous() for x in (hidden, weight, cu_seqlens))
    grad, bias = grad.float().contiguous(), None if bias is None else bias.contiguous()
    dhidden = torch.zeros_like(hidden) if need_hidden else None
    dweight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
    dbias = hidden.new_zeros(V, dtype=torch.float32) if need_bias and bias is not None else None
    if T and V:
        chosen = config.launch or _default_launch(hidden, weight)
        sequences = sequence_of_tokens(cu_seqlens, T)
        problem = _Problem(grad, hidden, weight, bias, cu_seqlens, sequences, activation, chosen)
        _walk(problem, dhidden, dweight, dbias, config)
    return (
        dhidden,
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )
