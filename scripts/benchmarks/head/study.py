"""From the cells of the heads to their records.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.gate import Results, timed_if_right
from benchmarks.head import judge, problems, suites
from benchmarks.head.heads import HEADS, head_of
from benchmarks.head.profile import profile
from benchmarks.head.suites import CAPTURED, COUNTERS, GEMMS, TRUTH, Cell, Shape
from benchmarks.screen import Columns, Record, timed_columns, timed_words
from benchmarks.study import Measured, Settings, Study
from benchmarks.timing import measure
from sparton.types import TokenBatch


def rate(record: Record) -> str:
    """TFLOP/s of a forward alone."""
    if "p50_ms" not in record or record["mode"] == suites.FORWARD_BACKWARD or record["backbone"]:
        return ""
    return f"{2 * record['T'] * record['D'] * record['V'] / record['p50_ms'] / 1e9:.0f}"


class HeadStudy(Study[Cell]):
    """Time and memory of the SPLADE heads.

    Suites are data, in benchmarks/head/suites.py; heads are one line each in heads.py beside it.
    Allowed are the errors of eager PyTorch in bfloat16 and a little more. Times are medians of
    launches back to back, at the clock that the card's power limit allows.
    """

    name = "head"
    cell = Cell
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "captured": {"help": "file of scripts/capture_batch.py, for the suite of this name"}
    }
    columns: ClassVar[Columns] = timed_columns(**{"TFLOP/s": rate})

    def suites(self, settings: Settings) -> dict[str, list[Cell]]:
        """All; that of a captured batch where there is one."""
        if path := settings.options["captured"]:
            problems.describe_capture(path)
            return suites.SUITES
        return {name: cells for name, cells in suites.SUITES.items() if name != CAPTURED}

    def context(self, suite: str, settings: Settings) -> Record:
        path = settings.options["captured"]
        return {"captured": problems.describe_capture(path) if suite == CAPTURED else None}

    def file_of(self, suite: str) -> str:
        return self.name if suite in suites.TOGETHER else f"{self.name}_{suite}"

    def needs(self, cell: Cell, settings: Settings) -> Sequence[Cell]:
        unjudged = cell.head in (*GEMMS, TRUTH) or cell.mode == COUNTERS
        return () if unjudged else (cell.truth(),)

    def origin(self, cell: Cell, settings: Settings) -> Hashable:
        if cell.shape != CAPTURED:
            return None
        path = Path(settings.options["captured"]).resolve()
        return path, path.stat().st_mtime_ns

    def words(self, record: Record) -> str:
        if "kernel" in record:
            return f"{record['kernel']} {record['microseconds']:,.0f} µs"
        return timed_words(record)

    def prepare(self, cells: Sequence[Cell], settings: Settings) -> Callable[[Cell], Measured]:
        """Imports, and the weights of a backbone, of the one cell."""
        (cell,) = cells
        if cell.mode == COUNTERS:
            return profile
        if cell.head in GEMMS:
            return partial(gemm, settings)
        if cell.compiles:
            import torch._inductor.compile_fx  # noqa: F401
        model: nn.Module = head_of(cell)
        if cell.backbone:
            from benchmarks.head import encoders

            model = encoders.build(cell, shape_of(cell, settings))
        return partial(self.truth if cell.head == TRUTH else self.judged, model, settings)

    def truth(self, model: Any, settings: Settings, cell: Cell) -> Record:
        """What an exact head gives, for the cells to come, and the errors of the eager one."""
        if cell.backbone:
            from benchmarks.head import encoders

            facts: dict[str, float] = {}
            truth, eager = encoders.make_truth(model, shape_of(cell, settings), settings.device)
        else:
            problem = make_problem(cell, settings)
            facts = problems.describe_pattern(problem)
            truth, eager = judge.make_truth(problem)
        path = self.place(cell, settings).with_suffix(".pt")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: x.cpu() for name, x in truth.items()}, path)
        return {"eager": eager, "facts": facts, "status": "ok"}

    def judged(self, model: Any, settings: Settings, cell: Cell) -> Record:
        """Judged by the truth of the problem, which is gone when the time is taken."""
        if cell.backbone:
            from benchmarks.head import encoders

            shape = shape_of(cell, settings)
            work = encoders.run_and_results(cell, model, shape, settings.device)
            V, D = shape.V, shape.D
        else:
            problem = make_problem(cell, settings)
            work = head_alone(cell, model, problem)
            V, D = problem.weight.shape
        timed, results, tokens = work
        found = results()
        path = self.place(cell.truth(), settings).with_suffix(".pt")
        truth = torch.load(path, map_location=settings.device, weights_only=True)
        errors = judge.errors(found, truth)
        found.clear()
        truth.clear()
        left = self.kept(cell.truth(), settings)
        assert left is not None, "the harness measures the truth before"
        slacks = HEADS[cell.head][1:] if cell.head in HEADS else ()
        allowed = judge.allowance(left["eager"], *slacks)
        measured = timed_if_right(errors, allowed, timed, settings)
        return {**sizes(tokens, V, D), **left["facts"], **measured}


def head_alone(
    cell: Cell, head: Callable[..., Tensor], problem: problems.Problem
) -> tuple[Callable[[], Any], Callable[[], Results], TokenBatch]:
    """What is timed, what its results are, and the tokens it runs on."""

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (head(*problem[:3], problem.tokens),)

    def training_forward() -> tuple[Tensor, ...]:
        return (head(*(x.detach().requires_grad_() for x in problem[:3]), problem.tokens),)

    def forward_backward() -> tuple[Tensor, ...]:
        return judge.gradients(head, problem)

    modes = (forward, training_forward, forward_backward)
    timed = modes[suites.MODES.index(cell.mode)]
    return timed, lambda: judge.results(problem, *(x.detach() for x in timed())), problem.tokens


def gemm(settings: Settings, cell: Cell) -> Record:
    """cuBLAS: all logits of the real tokens, the vocabulary as it is or padded to 64s."""
    problem = make_problem(cell, settings)
    V, D = problem.weight.shape
    rows = V if cell.head == suites.GEMM_AS_IS else -(-V // 64) * 64
    weight = problem.weight.new_zeros(rows, D)
    weight[:V] = problem.weight
    logits = weight.new_empty(problem.hidden.shape[0], rows)
    product = partial(torch.mm, problem.hidden, weight.T, out=logits)
    times = measure(product, settings.device, settings.seconds)
    return {**sizes(problem.tokens, V, D), **times, "status": "ok"}


def shape_of(cell: Cell, settings: Settings) -> Shape:
    shape = suites.shape_of(cell.shape)
    return shape.shrunk() if settings.miniature else shape


def make_problem(cell: Cell, settings: Settings) -> problems.Problem:
    if cell.shape == CAPTURED:
        return problems.captured_problem(settings.options["captured"], settings.device)
    return problems.random_problem(shape_of(cell, settings), cell.pattern, settings.device)


def sizes(tokens: TokenBatch, V: int, D: int) -> dict[str, int]:
    counts = {"N": tokens.num_sequences, "S": tokens.max_seqlen, "T": tokens.num_tokens}
    return {**counts, "D": D, "V": V}


STUDY = HeadStudy()
