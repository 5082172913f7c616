"""From the cells of attention to their records."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import ClassVar

from torch import Tensor

from benchmarks.attention import problems, tuning
from benchmarks.attention.problems import BOTH, FORWARD, SHAPES, Problem
from benchmarks.attention.providers import PROVIDERS, SPARTON, attempt
from benchmarks.gate import timed_if_right
from benchmarks.kernels import KernelCell, KernelStudy, floors
from benchmarks.screen import Columns, Record, figure, timed_words
from benchmarks.study import Measured, Settings

# In the place of a mode: all tilings of one of our kernels.
TUNED = {"tilings of forward": tuning.tune_forward, "tilings of backward": tuning.tune_backward}


class AttentionStudy(KernelStudy):
    """Time and memory of attention over packed sequences, ours and PyTorch's.

    Suites: providers, and tilings of our kernels. Shapes are data, in
    benchmarks/attention/problems.py. PyTorch's are FlashAttention on the packed tokens
    (torch.nn.attention.varlen) and scaled_dot_product_attention on padded ones, each of its
    backends; FlashAttention takes no mask, so it fails where there is padding. p50_ms is the median
    of calls back to back from eager Python, device_ms the time of the device's kernels alone.
    """

    name = "attention"
    seconds = 0.3
    limit = 300.0
    columns: ClassVar[Columns] = {"tiling": figure("tiling"), **KernelStudy.columns}

    def suites(self, settings: Settings) -> dict[str, list[KernelCell]]:
        providers = product(SHAPES, (FORWARD, BOTH), PROVIDERS)
        tilings = product(SHAPES, TUNED, (SPARTON,))
        return {
            "providers": [KernelCell(*each) for each in providers],
            "tilings": [KernelCell(*each) for each in tilings],
        }

    def file_of(self, suite: str) -> str:
        return "attention_tilings" if suite == "tilings" else self.name

    def problem(
        self, cells: Sequence[KernelCell], settings: Settings
    ) -> tuple[Problem, list[Tensor]]:
        shape = SHAPES[cells[0].shape]
        shape = shape.shrunk() if settings.miniature else shape
        problem = problems.make_problem(shape, settings.device)
        return problem, problems.truth(problem)

    def measure(
        self, cell: KernelCell, problem: Problem, truth: list[Tensor], settings: Settings
    ) -> Measured:
        if cell.mode in TUNED:
            return list(TUNED[cell.mode](problem, truth, settings))
        tried = attempt(cell.provider, problem)
        found = problems.errors(tried.results(cell.mode), truth)
        run = partial(tried.run, cell.mode)
        record = timed_if_right(found, problems.ALLOWED, run, settings, kernels=True)
        sizes = {"tokens": problem.grad.shape[0], "longest": problem.longest}
        return {**sizes, **record, **floors(*problem.least_work(cell.mode), settings)}

    def words(self, record: Record) -> str:
        return f"{record.get('tiling', '')} {timed_words(record)}".strip()


STUDY = AttentionStudy()
