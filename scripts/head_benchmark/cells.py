"""One cell, from its description to its record.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from head_benchmark import gate, problems, suites
from head_benchmark.heads import HEADS
from head_benchmark.suites import Cell, Shape
from head_benchmark.timing import measure

Record = dict[str, Any]


class Settings(NamedTuple):
    """What all cells of a run have in common.

    Attributes:
        device: cuda or cpu.
        cache: folder of the truths.
        seconds: how long a cell is timed.
        miniature: shrink every shape.
        captured: file of the captured problem.
    """

    device: str
    cache: str
    seconds: float = 0.7
    miniature: bool = False
    captured: str | None = None

    def shape(self, cell: Cell) -> Shape:
        shape = suites.shape_of(cell.shape)
        return shape.shrunk() if self.miniature else shape

    def truth_file(self, cell: Cell) -> Path:
        source: object = self.miniature
        if cell.shape == suites.CAPTURED and self.captured:
            source = (self.captured, Path(self.captured).stat().st_mtime_ns)
        name = hashlib.sha256(repr((cell.truth(), source, self.device)).encode()).hexdigest()[:16]
        return Path(self.cache) / f"{name}.pt"


def prepare(cell: Cell, settings: Settings) -> Callable[[], Record]:
    """All that a cell needs before it touches the device: imports, and the weights of a backbone.

    Returns:
        The cell itself; its record lacks what concerns the whole run.
    """
    if cell.compiles:
        import torch._inductor.compile_fx  # noqa: F401
    if cell.backbone:
        from head_benchmark import encoders

        model = encoders.build(cell, settings.shape(cell))
        work = _encoder_truth if cell.head == suites.TRUTH else _encoder
        return lambda: work(cell, model, settings)
    if cell.head == suites.TRUTH:
        return lambda: _truth(cell, settings)
    if cell.head in suites.GEMMS:
        return lambda: _gemm(cell, settings)
    head = HEADS[cell.head].build()
    return lambda: _head(cell, head, settings)


def run(work: Callable[[], Record]) -> Record:
    """The record of a prepared cell; out of memory is a result like any other."""
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "oom"}


def is_out_of_memory(error: BaseException | None) -> bool:
    """torch.compile wraps what happens within it."""
    if error is None or isinstance(error, torch.OutOfMemoryError):
        return error is not None
    inner = getattr(error, "inner_exception", None)
    return is_out_of_memory(inner or error.__cause__)


def _problem(cell: Cell, settings: Settings) -> problems.Problem:
    if cell.shape == suites.CAPTURED:
        assert settings.captured, "the captured cell needs a file"
        return problems.captured_problem(settings.captured, settings.device)
    return problems.random_problem(settings.shape(cell), cell.pattern, settings.device)


def _truth(cell: Cell, settings: Settings) -> Record:
    problem = _problem(cell, settings)
    truth, eager = gate.make_truth(problem)
    facts = problems.describe_pattern(problem)
    gate.save_truth(settings.truth_file(cell), truth, eager, facts)
    return {"status": "ok"}


def _encoder_truth(cell: Cell, model: Any, settings: Settings) -> Record:
    from head_benchmark import encoders

    truth, eager = encoders.make_truth(model, settings.shape(cell), settings.device)
    gate.save_truth(settings.truth_file(cell), truth, eager, {})
    return {"status": "ok"}


def _gemm(cell: Cell, settings: Settings) -> Record:
    """cuBLAS: all logits of the real tokens, the vocabulary as it is or padded to 64s."""
    problem = _problem(cell, settings)
    V, D = problem.weight.shape
    rows = V if cell.head == suites.GEMM_AS_IS else -(-V // 64) * 64
    weight = problem.weight.new_zeros(rows, D)
    weight[:V] = problem.weight
    logits = weight.new_empty(problem.hidden.shape[0], rows)

    def product() -> None:
        torch.mm(problem.hidden, weight.T, out=logits)

    return {
        **problem.sizes(),
        **measure(product, settings.device, settings.seconds),
        "status": "ok",
    }


def _head(cell: Cell, head: nn.Module, settings: Settings) -> Record:
    problem = _problem(cell, settings)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return head(*problem[:3], problem.tokens)

    def training_forward() -> torch.Tensor:
        return head(*(x.detach().requires_grad_() for x in problem[:3]), problem.tokens)

    def forward_backward() -> tuple[torch.Tensor, ...]:
        return gate.gradients(head, problem)

    modes = (forward, training_forward, forward_backward)
    timed = next(mode for mode in modes if mode.__name__ == cell.mode)
    outcome = timed()
    outcome = outcome if isinstance(outcome, tuple) else (outcome.detach(),)
    found = gate.results(problem, *outcome)
    del outcome
    return {**problem.sizes(), **_gated(cell, settings, found, timed)}


def _encoder(cell: Cell, model: Any, settings: Settings) -> Record:
    from head_benchmark import encoders

    shape = settings.shape(cell)
    timed, results, tokens = encoders.run_and_results(cell, model, shape, settings.device)
    sizes = {"N": tokens.num_sequences, "S": tokens.max_seqlen, "T": tokens.num_tokens}
    sizes |= {"D": shape.D, "V": shape.V}
    return {**sizes, **_gated(cell, settings, results(), timed)}


def _gated(cell: Cell, settings: Settings, found: gate.Results, timed: Callable[[], Any]) -> Record:
    """Time and memory of what passed the gate; of what did not, only its errors."""
    slacks = HEADS[cell.head][1:] if cell.head in HEADS else ()
    truth, eager, facts = gate.load_truth(settings.truth_file(cell), settings.device)
    errors, allowed = gate.errors(found, truth), gate.allowance(eager, *slacks)
    record = {**facts, "errors": errors, "allowed": {name: allowed[name] for name in errors}}
    if not gate.passes(errors, allowed):
        return {**record, "status": "red_gate"}
    found.clear()
    truth.clear()
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return {**record, **measure(timed, settings.device, settings.seconds), "status": "ok"}
