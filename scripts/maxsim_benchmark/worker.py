"""The process of one shape: ``python -m maxsim_benchmark.worker``, started by runner.py.

Reads cells of one shape and the settings from the command line, writes a line when it could begin,
waits for a line on standard input, and writes one line of JSON to standard output for each cell.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from head_benchmark.cells import is_out_of_memory
from head_benchmark.gate import passes
from head_benchmark.timing import device_ms, measure
from maxsim_benchmark import gate, problems
from maxsim_benchmark.providers import FP8_PROVIDERS, PROVIDERS, Cell
from maxsim_benchmark.shapes import BOTH, HIDDEN, SHAPES, least_work
from sparton.training.manifest import installed_version

Record = dict[str, Any]


class Settings(NamedTuple):
    """What all cells of a run have in common; ceilings of the card for the floors."""

    device: str
    seconds: float
    miniature: bool
    terabytes_per_s: float
    tflop_per_s: float


def measure_cell(
    cell: Cell, problem: problems.Problem, truth: problems.Results, settings: Settings
) -> Record:
    """The record of one cell, its results judged before its time is taken."""
    provider, gradients = PROVIDERS[cell.provider], cell.mode == BOTH
    version = installed_version(provider.package) if provider.package else None
    record: Record = {"package_version": version}
    try:
        score = provider.build(problem)
        outcome = problems.compared(problem, *problems.run(problem, score, gradients))
        errors = gate.errors(outcome, truth)
        # Projected tokens are rounded, whatever comes after.
        rounded = problem.shape.kind == HIDDEN
        ties = max(provider.ties, gate.ROUNDED) if rounded else provider.ties
        allowed = gate.allowance(errors, ties=ties, scores=provider.scores)
        record |= {"errors": errors, "allowed": allowed}
        if not passes(errors, allowed):
            return {**record, "status": "red_gate"}
        del outcome
        call = partial(problems.run, problem, score, gradients)
        times = measure(call, settings.device, settings.seconds)
        if settings.device == "cuda":
            times["device_ms"] = device_ms(call)
    except ImportError as error:
        return {**record, "status": "absent", "error": str(error)}
    except Exception as error:  # a provider that refuses a shape is a result, too
        if is_out_of_memory(error):
            return {**record, "status": "oom"}
        return {**record, "status": "failed", "error": f"{type(error).__name__}: {error}"[:400]}
    return {**record, **times, **_shares(cell, problem, times, settings), "status": "ok"}


def _shares(cell: Cell, problem: problems.Problem, times: Record, settings: Settings) -> Record:
    """Least traffic and arithmetic, their times, and how much of the time they explain."""
    work = least_work(problem.shape, cell.mode, problem.operand_bytes(), problem.tokens())
    rate = settings.tflop_per_s * (2 if cell.provider in FP8_PROVIDERS else 1)
    floors = work.floors(settings.terabytes_per_s, rate)
    share = max(floors.values()) / times["p50_ms"]
    return {"bytes": work.bytes, "flop": work.flop, **floors, "share_of_floor": round(share, 4)}


def prepare(
    shape: str, gradients: bool, settings: Settings
) -> tuple[problems.Problem, problems.Results]:
    """The problem and its truth."""
    wanted = SHAPES[shape].shrunk() if settings.miniature else SHAPES[shape]
    problem = problems.make_problem(wanted, settings.device)
    return problem, problems.truth(problem, gradients)


def main(arguments: Sequence[str]) -> None:
    # Libraries may print; standard output is for the records alone.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    listed, values = (json.loads(text) for text in arguments)
    settings, cells = Settings(**values), [Cell(*names) for names in listed]
    torch.backends.cuda.matmul.allow_tf32 = False
    answer.write("ready\n")
    answer.flush()
    if not sys.stdin.readline():
        sys.exit("nobody waits for these cells any more")
    shape = cells[0].shape
    problem, truth = prepare(shape, any(c.mode == BOTH for c in cells), settings)
    for cell in cells:
        begin = time.perf_counter()
        record = measure_cell(cell, problem, truth, settings)
        record["cell_seconds"] = round(time.perf_counter() - begin, 2)
        gc.collect()
        if settings.device == "cuda":
            torch.cuda.empty_cache()
        answer.write(json.dumps(record) + "\n")
        answer.flush()
    # Tearing down CUDA in order takes longer than many a measurement.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
