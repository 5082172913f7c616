"""Backward of the Sparton paper (its Algorithm 3): one kernel that scatters with atomics.

B sequences, S tokens of the longest, D hidden, V vocabulary.

An entry with ``reps > 0`` carries ``g = grad * exp(-reps)``; it adds ``g * hidden[b, argmax]`` to
``dweight[v]`` and ``g * weight[v]`` to ``dhidden[b, argmax]``. Programs meet at the same rows in
any order, so the last bits of the gradients differ from call to call.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import Launch, cdiv


class ScatterConfig(NamedTuple):
    """Vocabulary entries, sequences and hidden units of a program, and its warps."""

    block_v: int
    block_b: int
    block_d: int
    num_warps: int


DEFAULT_SCATTER = ScatterConfig(block_v=8, block_b=16, block_d=256, num_warps=2)


@triton.jit(do_not_specialize=["B", "S"])
def _hybrid_head_bwd_kernel(
    grad_ptr, reps_ptr, argmax_ptr, hidden_ptr, weight_ptr, dhidden_ptr, dweight_ptr, dbias_ptr,
    B, S, V, D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
    HIDDEN: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """BLOCK_V entries of BLOCK_B sequences, BLOCK_D of their units."""
    offs_v = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    first_b = tl.program_id(1).to(tl.int64) * BLOCK_B
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = (offs_d < D)[None, :]
    weight_offs = offs_v[:, None] * D + offs_d[None, :]
    w = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    if HIDDEN:
        w = tl.load(weight_ptr + weight_offs, (offs_v < V)[:, None] & in_d, 0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_V,), tl.float32)
    touched = tl.zeros((BLOCK_V,), tl.int32)
    for i in range(tl.minimum(B - first_b, BLOCK_B)):
        entry = (first_b + i) * V + offs_v
        reps = tl.load(reps_ptr + entry, offs_v < V, 0.0)
        active = reps > 0
        if tl.max(active.to(tl.int32), 0) > 0:
            g = tl.load(grad_ptr + entry, active, 0.0) * tl.exp(-reps)
            row = (first_b + i) * S + tl.load(argmax_ptr + entry, active, 0)
            hidden_offs = row[:, None] * D + offs_d[None, :]
            inside = active[:, None] & in_d
            if WEIGHT:
                h = tl.load(hidden_ptr + hidden_offs, inside, 0.0).to(tl.float32)
                dweight += g[:, None] * h
            if HIDDEN:
                tl.atomic_add(dhidden_ptr + hidden_offs, g[:, None] * w, inside, sem="relaxed")
            dbias += g
            touched = touched | active.to(tl.int32)
    touch = touched > 0
    if WEIGHT:
        tl.atomic_add(dweight_ptr + weight_offs, dweight, touch[:, None] & in_d, sem="relaxed")
    if BIAS and tl.program_id(2) == 0:
        tl.atomic_add(dbias_ptr + offs_v, dbias, touch, sem="relaxed")


def hybrid_head_backward(
    grad: Tensor,
    reps: Tensor,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    need_hidden: bool = True,
    need_weight: bool = True,
    need_bias: bool = True,
    *,
    config: ScatterConfig = DEFAULT_SCATTER,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``sum(grad * reps)``; not bitwise reproducible.

    Args:
        grad: upstream gradient ``[B, V]``, any strides.
        reps, argmax: what the forward returned.
        hidden: ``[B, S, D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or None; only its dtype is looked at.
        need_hidden, need_weight, need_bias: whether these gradients are wanted.
        config: how the work is cut.

    Returns:
        dhidden ``[B, S, D]``, dweight ``[V, D]``, dbias ``[V]``, each None if not wanted; summed in
        fp32, in the dtypes of the operands.

    Raises:
        ValueError: shapes that do not belong together.
    """
    (B, S, D), V = hidden.shape, weight.shape[0]
    if not reps.shape == argmax.shape == grad.shape == (B, V):
        raise ValueError(
            f"grad, reps and argmax must all be [B, V] = [{B}, {V}], got {tuple(grad.shape)}, "
            f"{tuple(reps.shape)}, {tuple(argmax.shape)}"
        )
    hidden, weight, grad = hidden.contiguous(), weight.contiguous(), grad.float().contiguous()
    dhidden = torch.zeros_like(hidden, dtype=torch.float32) if need_hidden else None
    dweight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
    dbias = None if bias is None or not need_bias else torch.zeros_like(bias, dtype=torch.float32)
    if reps.numel() and S:
        grid = tuple(map(cdiv, (V, B, D), config[:3]))
        Launch(
            _hybrid_head_bwd_kernel, grid, B, S, V,
            D=D, BLOCK_V=config.block_v, BLOCK_B=config.block_b, BLOCK_D=config.block_d,
            HIDDEN=need_hidden, WEIGHT=need_weight, BIAS=dbias is not None,
            num_warps=config.num_warps,
        )(grad, reps, argmax, hidden, weight, dhidden, dweight, dbias)  # fmt: skip
    return (
        None if dhidden is None else dhidden.to(hidden.dtype),
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )
