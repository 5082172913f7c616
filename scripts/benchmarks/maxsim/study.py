"""From the cells of MaxSim to their records."""

from functools import partial
from typing import ClassVar

from benchmarks.gate import Results, timed_if_right
from benchmarks.kernels import KernelCell, KernelStudy, floors, run
from benchmarks.maxsim import problems
from benchmarks.maxsim.problems import Problem
from benchmarks.maxsim.providers import FP8_PROVIDERS, PROVIDERS, cells
from benchmarks.maxsim.shapes import HIDDEN, SHAPES, Shape, least_work
from benchmarks.screen import Columns, Record, figure
from benchmarks.study import Settings
from sparton.training.manifest import installed_version


class MaxSimStudy(KernelStudy):
    """Time and memory of MaxSim, ours and others'.

    Shapes are data, in benchmarks/maxsim/shapes.py; providers are one line each in providers.py
    beside it. Scores and gradients are compared with fp32 truth. Times are medians of launches back
    to back. The floor of a shape is the time of its least traffic or least arithmetic at the card's
    ceilings, whichever is longer.
    """

    name = "maxsim"
    shapes = SHAPES
    limit = 60.0
    columns: ClassVar[Columns] = {
        **KernelStudy.columns,
        "of the floor": figure("share_of_floor", ".0%"),
    }

    def suites(self, settings: Settings) -> dict[str, list[KernelCell]]:
        return {self.name: cells(self.shapes, PROVIDERS)}

    def problem(self, shape: Shape, gradients: bool, device: str) -> tuple[Problem, Results]:
        problem = problems.make_problem(shape, device)
        return problem, problems.truth(problem, gradients)

    def measure(
        self, cell: KernelCell, problem: Problem, truth: Results, settings: Settings
    ) -> Record:
        provider = PROVIDERS[cell.provider]
        score = provider.build(problem)
        call = partial(run, score, problem.leaves, problem.upstream, cell.mode)
        found = problems.errors(problems.compared(problem, *call()), truth)
        # Projected tokens are rounded, whatever comes after.
        rounded = problem.shape.kind == HIDDEN
        ties = max(provider.ties, problems.ROUNDED) if rounded else provider.ties
        allowed = problems.allowance(found, ties=ties, scores=provider.scores)
        record = timed_if_right(found, allowed, call, settings, kernels=True)
        version = installed_version(provider.package) if provider.package else None
        work = least_work(problem.shape, cell.mode, problem.operand_bytes(), problem.tokens())
        faster = 2.0 if cell.provider in FP8_PROVIDERS else 1.0
        record |= {"package_version": version, **floors(*work, settings, faster)}
        if record["status"] == "ok":
            floor = max(record["memory_floor_ms"], record["flop_floor_ms"])
            record["share_of_floor"] = round(floor / record["p50_ms"], 4)
        return record


STUDY = MaxSimStudy()
