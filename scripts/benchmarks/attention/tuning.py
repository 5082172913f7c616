"""Tilings of our kernels, by the part that they are for; winners are copied by hand into
forward_tiling and backward_tiling."""

from collections.abc import Callable
from itertools import product

from torch import Tensor

from benchmarks.attention.problems import Problem
from sparton.kernels.varlen_attention import backward, forward
from sparton.kernels.varlen_attention.operands import AttentionOperands
from sparton.kernels.varlen_attention.tiles import Tiling

# Rows of both blocks and warps, each with every number of stages.
BLOCKS = {
    "forward": (
        (32, 32, 2), (32, 64, 2), (64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4),
        (128, 64, 4), (128, 64, 8), (128, 128, 8),
    ),
    "queries": ((32, 32, 2), (64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 64, 8)),
    "keys": ((32, 32, 2), (32, 64, 4), (64, 64, 4), (32, 128, 8), (64, 128, 8)),
}  # fmt: skip
TILINGS = {
    f"{part} {' '.join(map(str, (*block, stages)))}": (part, Tiling(*block, stages))
    for part, blocks in BLOCKS.items()
    for block, stages in product(blocks, (1, 2, 3))
}


def launch(name: str, problem: Problem) -> Callable[[], tuple[Tensor, ...]]:
    """A launch with a tiling: of the forward, or of one part of the backward beside the usual
    tiling of the other."""
    part, tiling = TILINGS[name]
    bounds, longest, d = problem.cu_seqlens, problem.longest, problem.grad.shape[2]
    operands = AttentionOperands(*problem.states, bounds, bounds, longest, longest, d**-0.5)
    if part == "forward":
        return lambda: (forward.varlen_attention_forward(operands, tiling=tiling)[0],)
    out, lse = forward.varlen_attention_forward(operands)
    assert lse is not None
    both = backward.backward_tiling(d)._replace(**{part: tiling})
    return lambda: backward.varlen_attention_backward(problem.grad, operands, out, lse, tiling=both)
