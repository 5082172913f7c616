"""From the cells of attention to their records."""

from functools import partial
from itertools import product

from torch import Tensor

from benchmarks.attention import problems
from benchmarks.attention.problems import BOTH, SHAPES, Problem
from benchmarks.attention.providers import PROVIDERS, attempt
from benchmarks.gate import timed_if_right
from benchmarks.kernels import FORWARD, KernelCell, KernelStudy, floors
from benchmarks.screen import Record
from benchmarks.study import Settings


class AttentionStudy(KernelStudy):
    """Time and memory of attention over packed sequences, ours and PyTorch's.

    Shapes are data, in benchmarks/attention/problems.py. PyTorch's are FlashAttention on the packed
    tokens (torch.nn.attention.varlen) and scaled_dot_product_attention on padded ones, each of its
    backends; FlashAttention takes no mask, so it fails where there is padding. p50_ms is the median
    of calls back to back from eager Python, device_ms the time of the device's kernels alone. On a
    CPU our kernels run where TRITON_INTERPRET=1 is in the environment.
    """

    name = "attention"
    shapes = SHAPES
    seconds = 0.3
    limit = 120.0

    def suites(self, settings: Settings) -> dict[str, list[KernelCell]]:
        cells = product(SHAPES, (FORWARD, BOTH), PROVIDERS)
        return {"providers": [KernelCell(*each) for each in cells]}

    def problem(
        self, shape: problems.Shape, gradients: bool, device: str
    ) -> tuple[Problem, list[Tensor]]:
        problem = problems.make_problem(shape, device)
        return problem, problems.truth(problem)

    def measure(
        self, cell: KernelCell, problem: Problem, truth: list[Tensor], settings: Settings
    ) -> Record:
        tried = attempt(cell.provider, problem)
        found = problems.errors(tried.results(cell.mode), truth)
        run = partial(tried.run, cell.mode)
        record = timed_if_right(found, problems.ALLOWED, run, settings, kernels=True)
        sizes = {"tokens": problem.grad.shape[0], "longest": problem.longest}
        return {**sizes, **record, **floors(*problem.least_work(cell.mode), settings)}


STUDY = AttentionStudy()
