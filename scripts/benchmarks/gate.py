"""The gate before every time: no time for results that differ too much from the truth; and what
becomes of a cell that has none."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.screen import Record
from benchmarks.study import Measured, Settings
from benchmarks.timing import device_ms, measure

Results = dict[str, Tensor]
Errors = dict[str, float]


def relative_errors(actual: Results, truth: Results) -> Errors:
    """Norms of the differences relative to the truth's."""
    return {
        name: float((x - truth[name]).norm() / truth[name].norm().clamp_min(1e-30))
        for name, x in actual.items()
    }


def passes(found: Errors, allowed: Errors) -> bool:
    """No error beyond what is allowed; NaN is."""
    return all(error <= allowed[name] for name, error in found.items())


def timed_if_right(
    found: Errors,
    allowed: Errors,
    run: Callable[[], Any],
    settings: Settings,
    *,
    kernels: bool = False,
    one_core: bool = True,
) -> Record:
    """Time and memory of what passes; of what does not, only its errors.

    Args:
        kernels: take the time of the device's kernels alone as well.
        one_core: see :func:`benchmarks.timing.measure`.
    """
    record = {"errors": found, "allowed": {name: allowed[name] for name in found}}
    if not passes(found, allowed):
        return {**record, "status": "red_gate"}
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    times = measure(run, settings.device, settings.seconds, one_core=one_core)
    if kernels and settings.device == "cuda":
        times["device_ms"] = device_ms(run)
    return {**record, **times, "status": "ok"}


def outcome(measure: Callable[[], Measured]) -> list[Record]:
    """What a cell measured; a lack of memory, a missing package and a refusal are results, too."""
    try:
        measured = measure()
    except ImportError as error:
        return [{"status": "absent", "error": str(error)}]
    except Exception as error:
        if is_out_of_memory(error):
            return [{"status": "oom"}]
        return [{"status": "failed", "error": f"{type(error).__name__}: {error}"[:400]}]
    return measured if isinstance(measured, list) else [measured]


def is_out_of_memory(error: BaseException | None) -> bool:
    """torch.compile wraps what happens within it."""
    if error is None or isinstance(error, torch.OutOfMemoryError):
        return error is not None
    inner = getattr(error, "inner_exception", None)
    return is_out_of_memory(inner or error.__cause__)
