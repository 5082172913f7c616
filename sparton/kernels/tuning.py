"""Search for the fastest configuration of a kernel, among those whose results are right.

Compilers have been seen to return zeros in record time. So no configuration is timed before its
results were compared with full-precision ones at the very shape that is measured, in outputs that
held NaN before the launch; one that fails is named and never chosen.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.tuned import Regime, write_winner


class Problem(NamedTuple):
    """What is searched.

    Attributes:
        regime: what the winner belongs to.
        configs: what is tried, NamedTuples.
        launch: what is timed of a configuration.
        fault: launches a configuration and says what is wrong with the results, or None. Errors
            that it raises are faults, too.
    """

    regime: Regime
    configs: Sequence[Any]
    launch: Callable[[Any], object]
    fault: Callable[[Any], str | None]


class Trial(NamedTuple):
    """One configuration: why it was refused (None: it was not), and its time, then infinite."""

    config: Any
    fault: str | None
    milliseconds: float


Timer = Callable[[Callable[[], object]], float]


def cuda_milliseconds(run: Callable[[], object]) -> float:
    """Median time of 20 calls after 5, between CUDA events."""
    for _ in range(5):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(20)]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def neighbours(config: Any, changes: Mapping[str, Sequence[Any]]) -> list[Any]:
    """The configuration and what one other setting makes of it."""
    changed = (config._replace(**{name: x}) for name, values in changes.items() for x in values)
    return list(dict.fromkeys([config, *changed]))


def search(problem: Problem, *, timer: Timer = cuda_milliseconds) -> list[Trial]:
    """Verify, then time, every configuration; in the order given. ``timer``: milliseconds of a
    call."""
    trials = []
    for config in problem.configs:
        fault = _fault(problem, config)
        time = math.inf if fault else timer(lambda: problem.launch(config))  # noqa: B023
        trials.append(Trial(config, fault, time))
    return trials


def tune(problem: Problem, *, timer: Timer = cuda_milliseconds) -> list[Trial]:
    """Search one regime, use its winner from now on and keep it in the user's cache.

    Returns:
        All trials, the fastest first, the refused ones last.

    Raises:
        RuntimeError: no configuration gave right results.
    """
    trials = sorted(search(problem, timer=timer), key=lambda trial: trial.milliseconds)
    if all(trial.fault for trial in trials):
        faults = "; ".join(f"{trial.config}: {trial.fault}" for trial in trials)
        raise RuntimeError(
            f"{problem.regime.kernel}: no configuration gave right results: "
            f"{faults or 'none was given'}"
        )
    write_winner(problem.regime, trials[0].config, trials[0].milliseconds)
    return trials


def random_bounds(mean_length: int, tokens: int) -> Tensor:
    """Boundaries, int32 on the CPU, of sequences with about so many tokens together. Lengths lie
    between a half and one and a half of the mean, and one sequence is empty."""
    generator = torch.Generator().manual_seed(0)
    low, high = max(mean_length // 2, 1), mean_length + mean_length // 2
    lengths = torch.randint(low, high + 1, (max(tokens // mean_length, 2),), generator=generator)
    lengths[lengths.numel() // 2] = 0
    return cu_seqlens_of(lengths, torch.int32)


def wrong_gradients(truth: Sequence[Tensor], found: Sequence[Tensor | None]) -> str | None:
    """What is wrong with gradients that are sums in fp32, rounded once to their dtype."""
    for row, (exact, gradient) in enumerate(zip(truth, found, strict=True)):
        if gradient is None or gradient.shape != exact.shape:
            return f"gradient {row} is missing, or not {tuple(exact.shape)}"
        if bad := int((~gradient.isfinite()).sum()):
            return f"{bad} of {gradient.numel()} elements of gradient {row} were not written"
        difference = (gradient.float() - exact).abs()
        rounding = torch.finfo(gradient.dtype).eps * exact.abs() + 1e-4 * exact.abs().max()
        if bad := int((difference > rounding).sum()):
            worst = float(difference.max() / exact.abs().max())
            return (
                f"{bad} of {gradient.numel()} elements of gradient {row} are wrong, by up to "
                f"{worst:.2g} of the largest"
            )
    return None


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of fp32 are exact, as those of a truth must be."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _fault(problem: Problem, config: Any) -> str | None:
    """Why a configuration must not be used, or None."""
    try:
        with _poisoned_allocations():
            return problem.fault(config)
    except (TritonError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """PyTorch fills uninitialised memory with NaN, or integers that index nothing."""
    settings: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)
