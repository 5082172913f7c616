"""Figures of a cell from the lines of its log, and whether its losses can be believed."""

import math
import statistics
from collections.abc import Sequence

from benchmarks.screen import Record, figure
from benchmarks.timing import quantiles
from benchmarks.training.suites import THEIRS, WARM_UP_WINDOWS, Cell

# What screen and tables show.
SHOWN = {
    "pairs/s": figure("examples_per_second_p50", ",.0f"),
    "ms/step": figure("step_ms_p50", ",.0f"),
    "peak GiB": figure("peak_allocated_gib", ".1f"),
    "MFU": figure("mfu", ".1%"),
    "waits for data ms": figure("data_wait_ms", ".1f"),
    "first step after s": figure("seconds_to_first_step", ".0f"),
}
SPREAD = ("examples_per_second", "step_ms")
MEDIANS = ("tokens_per_second", "data_wait_ms", "mfu")
PEAKS = {"memory_allocated_mib": "peak_allocated_gib", "memory_reserved_mib": "peak_reserved_gib"}
# What a first window says of the mathematics; FLOPS follows the square of every weight.
SIGNATURE = ("loss", "loss_query_flops", "loss_document_flops")
# Relative difference of the signatures of two heads that compute the same: other roundings, and
# other masks of dropout where one of them is compiled.
TOLERANCE = 0.1
LARGEST_RISE = 0.25
KERNELS, NAME = 60, 120  # of a profile, and characters of a kernel's name


def profile(found: Record) -> Record:
    """What a training's profile.json says, of the kernels that take most."""
    kernels = [each | {"name": each["name"][:NAME]} for each in found["kernels"]]
    rest = sum(each["ms"] for each in kernels[KERNELS:])
    return found | {"kernels": kernels[:KERNELS], "others_ms": round(rest, 4)}


def summary(
    lines: Sequence[Record], arrivals: Sequence[float], recompiled: Sequence[int], log_every: int
) -> Record:
    """Quantiles over the windows after the warm-up, peaks over all, and how the run started."""
    # A training also logs its first step, which is no window.
    whole = [place for place, line in enumerate(lines) if line["step"] % log_every == 0]
    lines = [lines[place] for place in whole]
    arrivals, recompiled = [arrivals[n] for n in whole], [recompiled[n] for n in whole]
    measured = lines[WARM_UP_WINDOWS:]
    found: Record = {"windows": len(measured)}
    for key in SPREAD:
        found |= quantiles([line[key] for line in measured], f"{key}_p{{}}")
    for key in MEDIANS:
        if all(key in line for line in measured):
            found[key] = statistics.median(line[key] for line in measured)
    for key, name in PEAKS.items():
        if all(key in line for line in lines):
            found[name] = max(line[key] for line in lines) / 1024
    # The first step's line is not waited for; the others of its window take their usual time.
    others = (log_every - 1) * found["step_ms_p50"] / 1e3
    found["seconds_to_first_step"] = max(arrivals[0] - others, 0.0)
    found["seconds_to_first_window"] = arrivals[0]
    found["recompilations"] = recompiled[-1]
    found["recompilations_after_warm_up"] = recompiled[-1] - recompiled[WARM_UP_WINDOWS - 1]
    found |= {"loss_first": lines[0]["loss"], "loss_last": lines[-1]["loss"]}
    found["loss"] = statistics.fmean(line["loss"] for line in measured)
    found = {key: round(x, 5) if isinstance(x, float) else x for key, x in found.items()}
    return found | {"signature": {key: lines[0][key] for key in SIGNATURE if key in lines[0]}}


def objection(cell: Cell, record: Record, earlier: Sequence[tuple[Cell, Record]]) -> str | None:
    """Why the losses of a cell cannot be believed, None if they can.

    Cells of one model and trainer that see the same batches from the same start must log the same
    first signature; the first of them that was measured is what the others are compared with.
    """
    first, last = record["loss_first"], record["loss_last"]
    if not (math.isfinite(first) and math.isfinite(last)):
        return f"the loss went from {first} to {last}"
    if last > first * (1 + LARGEST_RISE):
        return f"the loss rose from {first:.4g} to {last:.4g}"
    for other, found in earlier if cell.system != THEIRS else ():
        if found["status"] == "ok" and same_losses(cell, other):
            return _difference(record["signature"], found["signature"], other.label)
    return None


def _difference(signature: Record, expected: Record, whose: str) -> str | None:
    for key, value in expected.items():
        if not abs(signature[key] - value) <= TOLERANCE * abs(value):
            return f"first {key} is {signature[key]:.4g}, that of {whose} {value:.4g}"
    return None


def same_losses(cell: Cell, other: Cell) -> bool:
    """Whether two cells see the same batches and compute the same of them."""
    model = ("model", "backbone", "lora", "vocabulary", "activity")
    keys = ("trainer", *model, "batch", "local_batch", "lengths")
    return all(getattr(cell, key) == getattr(other, key) for key in keys)
