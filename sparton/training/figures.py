"""What a run's ``metrics.jsonl`` says of its speed and memory."""

import statistics
from pathlib import Path
from typing import Any

from sparton.training.loggers import read_log

_RATES = ("examples_per_second", "tokens_per_second", "step_ms", "data_wait_ms", "mfu")


def training_figures(path: Path) -> dict[str, Any]:
    """Medians over the log lines without the first, which holds compilation and warm-up; the
    highest peak of memory of all lines. Empty where there is no line yet.

    ``hours`` is the time of all steps, evaluations left out.
    """
    lines = read_log(path)
    timed = [line for line in lines if "step_ms" in line]
    if not timed:
        return {}
    warm = timed[1:] or timed
    figures: dict[str, Any] = {
        key: statistics.median(line[key] for line in warm)
        for key in _RATES
        if all(key in line for line in warm)
    }
    if len(warm) > 1:
        quantiles = statistics.quantiles((line["step_ms"] for line in warm), n=5)
        figures |= {"step_ms_p20": quantiles[0], "step_ms_p80": quantiles[-1]}
    peaks = [line["memory_allocated_mib"] for line in lines if "memory_allocated_mib" in line]
    if peaks:
        figures["peak_memory_mib"] = max(peaks)
    starts = [0, *(line["step"] for line in timed)]
    milliseconds = sum(
        (line["step"] - start) * line["step_ms"] for start, line in zip(starts, timed)
    )
    figures["hours"] = milliseconds / 3.6e6
    return figures | {"steps": lines[-1]["step"], "loss": warm[-1]["loss"]}
