"""Tilings of our kernels, each verified before it is timed; winners are copied by hand into
forward_tiling and backward_tiling."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from torch import Tensor

from benchmarks.attention.problems import ALLOWED, Problem, errors
from benchmarks.gate import outcome, timed_if_right
from benchmarks.screen import Record
from benchmarks.study import Settings
from sparton.kernels.varlen_attention import backward, forward
from sparton.kernels.varlen_attention.operands import AttentionOperands
from sparton.kernels.varlen_attention.tiles import Tiling


def tilings(*blocks: tuple[int, int, int]) -> tuple[Tiling, ...]:
    """Each pair of blocks and number of warps, with every number of stages."""
    return tuple(Tiling(*block, stages) for block, stages in product(blocks, (1, 2, 3)))


FORWARDS = tilings(
    (32, 32, 2), (32, 64, 2), (64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4),
    (128, 64, 8), (128, 128, 8),
)  # fmt: skip
BACKWARDS = {
    "queries": tilings((32, 32, 2), (64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 64, 8)),
    "keys": tilings((32, 32, 2), (32, 64, 4), (64, 64, 4), (32, 128, 8), (64, 128, 8)),
}


def tune_forward(problem: Problem, expected: list[Tensor], settings: Settings) -> Iterator[Record]:
    """The record of every tiling; in miniature of two."""
    operands = _operands(problem)
    usual = forward.forward_tiling(problem.grad.shape[2], problem.longest)

    def run(tiling: Tiling) -> tuple[Tensor | None, ...]:
        return forward.varlen_attention_forward(operands, tiling=tiling)

    for tiling in (usual, *FORWARDS)[: 2 if settings.miniature else None]:
        yield _tried(run, tiling, expected[:1], settings)


def tune_backward(problem: Problem, expected: list[Tensor], settings: Settings) -> Iterator[Record]:
    """The same, one part after the other, each beside the best of those before."""
    operands = _operands(problem)
    out, lse = forward.varlen_attention_forward(operands)
    assert lse is not None

    def run(tiling: backward.BackwardTiling) -> tuple[Tensor, ...]:
        return backward.varlen_attention_backward(problem.grad, operands, out, lse, tiling=tiling)

    best, shortest = backward.backward_tiling(problem.grad.shape[2]), float("inf")
    for part, choices in BACKWARDS.items():
        for choice in (getattr(best, part), *choices)[: 2 if settings.miniature else None]:
            tiling = best._replace(**{part: choice})
            record = _tried(run, tiling, expected[1:], settings)
            if record.get("p50_ms", shortest) < shortest:
                best, shortest = tiling, record["p50_ms"]
            yield record


def _operands(problem: Problem) -> AttentionOperands:
    bounds, longest = problem.cu_seqlens, problem.longest
    scale = problem.grad.shape[2] ** -0.5
    return AttentionOperands(*problem.states, bounds, bounds, longest, longest, scale)


def _tried(
    run: Callable[[Any], Any], tiling: Any, expected: list[Tensor], settings: Settings
) -> Record:
    """One that takes too many registers or too much shared memory is a record, too."""

    def measure() -> Record:
        found = errors(run(tiling), expected)
        return timed_if_right(found, ALLOWED, lambda: run(tiling), settings)

    return {"tiling": str(tiling), **outcome(measure)[0]}
