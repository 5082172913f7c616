"""From the cells of the heads to their records.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import ClassVar, Protocol

import torch

from benchmarks.gate import timed_if_right
from benchmarks.head import judge, problems, suites
from benchmarks.head.heads import HEADS
from benchmarks.head.judge import Truth, Work
from benchmarks.head.profile import profile
from benchmarks.head.suites import COUNTERS, GEMMS, Cell, Shape
from benchmarks.screen import Columns, Record, timed_columns, timed_words
from benchmarks.study import Measured, Settings, Study
from benchmarks.timing import measure

# Of the bare product, at once.
LOGIT_BYTES = 16 * 2**30


def rate(record: Record) -> str:
    """TFLOP/s of a forward alone."""
    if "p50_ms" not in record or record["mode"] == suites.FORWARD_BACKWARD or record["backbone"]:
        return ""
    return f"{2 * record['T'] * record['D'] * record['V'] / record['p50_ms'] / 1e9:.0f}"


class Bench(Protocol):
    """What the cells of a process have in common; its truth is made when it is first asked for."""

    @property
    def truth(self) -> Truth: ...

    def work(self, cell: Cell) -> Work: ...


class HeadStudy(Study[Cell]):
    """Time and memory of the SPLADE heads.

    Suites are data, in benchmarks/head/suites.py; heads are one line each in heads.py beside it.
    Allowed are the errors of eager PyTorch in bfloat16 and a little more. Times are medians of
    launches back to back, at the clock that the card's power limit allows.
    """

    name = "head"
    cell = Cell
    columns: ClassVar[Columns] = timed_columns(**{"TFLOP/s": rate})

    def suites(self, settings: Settings) -> dict[str, list[Cell]]:
        return suites.SUITES

    def file_of(self, suite: str) -> str:
        return self.name if suite in suites.TOGETHER else f"{self.name}_{suite}"

    def process_of(self, cell: Cell) -> Hashable:
        """Cells of one problem share its operands and its truth, those behind a backbone the
        code that compiles it."""
        return cell.shape, cell.pattern, cell.backbone, cell.mode == COUNTERS

    def words(self, record: Record) -> str:
        if "kernel" in record:
            return f"{record['kernel']} {record['microseconds']:,.0f} µs"
        return timed_words(record)

    def prepare(self, cells: Sequence[Cell], settings: Settings) -> Callable[[Cell], Measured]:
        """Imports, and the weights of a backbone."""
        first = cells[0]
        if first.mode == COUNTERS:
            return profile
        if any(cell.compiles for cell in cells):
            import torch._inductor.compile_fx  # noqa: F401
        shape = suites.shape_of(first.shape)
        shape = shape.shrunk() if settings.miniature else shape
        bench: Bench = HeadsAlone(shape, first.pattern, settings.device)
        if first.backbone:
            from benchmarks.head.encoders import Encoders

            bench = Encoders(shape, settings.device, compiled=first.backbone == "compiled")
        return partial(measured, bench, shape, settings)


class HeadsAlone:
    """Heads on the operands of one problem."""

    def __init__(self, shape: Shape, pattern: str, device: str) -> None:
        self._facts = shape, pattern, device

    @cached_property
    def problem(self) -> problems.Problem:
        return problems.random_problem(*self._facts)

    @cached_property
    def truth(self) -> Truth:
        return judge.make_truth(self.problem)

    def work(self, cell: Cell) -> Work:
        problem = self.problem
        if cell.head in GEMMS:
            return Work(product(problem, padded=cell.head == suites.GEMM), dict, problem.tokens)
        head = HEADS[cell.head].build()

        def forward() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return (head(*problem[:3], problem.tokens),)

        def training_forward() -> tuple[torch.Tensor, ...]:
            return (head(*(x.detach().requires_grad_() for x in problem[:3]), problem.tokens),)

        def forward_backward() -> tuple[torch.Tensor, ...]:
            return judge.gradients(head, problem)

        modes = (forward, training_forward, forward_backward)
        timed = modes[suites.MODES.index(cell.mode)]
        return Work(
            timed, lambda: judge.results(problem, *(x.detach() for x in timed())), problem.tokens
        )


def product(problem: problems.Problem, *, padded: bool) -> Callable[[], None]:
    """cuBLAS: all logits of the real tokens, the vocabulary as it is or padded to 64s; in parts
    where they would not fit."""
    V, D = problem.weight.shape
    weight = problem.weight.new_zeros(-(-V // 64) * 64 if padded else V, D)
    weight[:V] = problem.weight
    rows = max(LOGIT_BYTES // (2 * weight.shape[0]) // 1024 * 1024, 1024)
    parts = problem.hidden.split(rows)
    logits = weight.new_empty(len(parts[0]), weight.shape[0])

    def run() -> None:
        for part in parts:
            torch.mm(part, weight.T, out=logits[: len(part)])

    return run


def measured(bench: Bench, shape: Shape, settings: Settings, cell: Cell) -> Record:
    """Judged by the truth of its problem, which is off the device when the time is taken; the bare
    product is judged by nothing."""
    truth = None if cell.head in GEMMS else bench.truth
    timed, results, tokens = bench.work(cell)
    sizes = {"N": tokens.num_sequences, "S": tokens.max_seqlen, "T": tokens.num_tokens}
    sizes |= {"D": shape.D, "V": shape.V}
    if truth is None:
        return {**sizes, **measure(timed, settings.device, settings.seconds), "status": "ok"}
    found = results()
    expected = {name: truth.results[name].to(x.device) for name, x in found.items()}
    errors = judge.errors(found, expected)
    found.clear()
    expected.clear()
    slacks = HEADS[cell.head][1:] if cell.head in HEADS else ()
    allowed = judge.allowance(truth.eager, *slacks)
    return {**sizes, **truth.facts, **timed_if_right(errors, allowed, timed, settings)}


STUDY = HeadStudy()
