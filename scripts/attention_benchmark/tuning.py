"""Tilings of our kernels, each verified before it is timed."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from torch import Tensor

from attention_benchmark.problems import Problem, errors, passes
from head_benchmark.timing import measure
from sparton.kernels.varlen_attention.backward import (
    BackwardTiling,
    backward_tiling,
    varlen_attention_backward,
)
from sparton.kernels.varlen_attention.forward import forward_tiling, varlen_attention_forward
from sparton.kernels.varlen_attention.operands import AttentionOperands
from sparton.kernels.varlen_attention.tiles import Tiling

Record = dict[str, Any]
FORWARDS = tuple(
    Tiling(*blocks, warps, stages)
    for (*blocks, warps), stages in product(
        ((32, 32, 2), (32, 64, 2), (64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4),
         (128, 64, 4), (128, 64, 8), (128, 128, 8)),
        (1, 2, 3),
    )
)  # fmt: skip
CHOICES: dict[str, Sequence[Any]] = {
    "queries": tuple(
        Tiling(*blocks, warps, stages)
        for (*blocks, warps), stages in product(
            ((32, 32, 2), (64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 64, 8)), (1, 2, 3)
        )
    ),
    "keys": tuple(
        Tiling(*blocks, warps, stages)
        for (*blocks, warps), stages in product(
            ((32, 32, 2), (32, 64, 4), (64, 64, 4), (32, 128, 8), (64, 128, 8)), (1, 2, 3)
        )
    ),
}


def tune(
    problem: Problem, expected: list[Tensor], device: str, seconds: float, quick: bool
) -> Iterator[tuple[str, Any, Record]]:
    """Name of the part, tiling and record of every one that was tried; of the backward one part
    after the other, each beside the best of those before.

    Args:
        quick: try two of each part.
    """
    bounds = (problem.cu_seqlens, problem.cu_seqlens, problem.longest, problem.longest)
    d, most = problem.grad.shape[2], 2 if quick else None
    operands = AttentionOperands(*problem.states, *bounds, d**-0.5)

    def forward(tiling: Tiling) -> tuple:
        return varlen_attention_forward(operands, tiling=tiling)

    def backward(tiling: BackwardTiling) -> tuple:
        return varlen_attention_backward(problem.grad, operands, out, lse, tiling=tiling)

    for tiling in (forward_tiling(d, problem.longest), *FORWARDS)[:most]:
        yield "forward", tiling, _record(forward, tiling, expected[:1], device, seconds)
    out, lse = varlen_attention_forward(operands)
    best, shortest = backward_tiling(d), float("inf")
    for part, choices in CHOICES.items():
        for choice in (getattr(best, part), *choices)[:most]:
            tiling = best._replace(**{part: choice})
            record = _record(backward, tiling, expected[1:], device, seconds)
            if record.get("p50_ms", shortest) < shortest:
                best, shortest = tiling, record["p50_ms"]
            yield f"backward {part}", tiling, record


def _record(
    run: Callable[[Any], tuple], tiling: Any, expected: list[Tensor], device: str, seconds: float
) -> Record:
    try:
        found = errors(run(tiling), expected)
        if not passes(found):
            return {"status": "red_gate", "errors": found}
        return {"status": "ok", "errors": found, **measure(lambda: run(tiling), device, seconds)}
    except Exception as error:  # out of registers or shared memory, say
        return {"status": "failed", "error": first_line(error)}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
