"""The record of a profile: what the GPU did in a few steps, and what it waited for."""

import json
import shutil
from pathlib import Path
from typing import Any

from training_benchmark.commands import (
    PYTHON,
    STEP_PROFILE,
    Place,
    launcher,
    overrides,
    shown,
)
from training_benchmark.runner import Settings, outcome_of, watch
from training_benchmark.suites import Cell, plan
from training_benchmark.trace import summarize
from training_benchmark.workload import prepare

Record = dict[str, Any]
WARM_UP_STEPS, STEPS = 12, 10
# A product of large bf16 matrices on an H200, back to back: what no training step can exceed.
GEMM_FLOPS = 790e12


def profile_cell(cell: Cell, settings: Settings) -> Record:
    """The record of a cell's profile, but for what concerns the whole run."""
    found = plan(cell, settings.seconds, settings.miniature)
    kinds = found.vocabulary, cell.activity, found.lengths
    model, pairs = prepare(settings.folder, *kinds, settings.miniature)
    run = settings.folder / "profile"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    settings_of_run = overrides(cell, found, Place(model, pairs, "profile"), settings.miniature)
    steps = WARM_UP_STEPS + STEPS + 1
    numbers = {"steps": steps, "log_every": steps + 1}
    kept = [word for word in settings_of_run if word.split("=")[0] not in numbers]
    kept = [word for word in kept if not word.startswith("hydra.")]
    kept += [f"{key}={value}" for key, value in numbers.items()]
    numbered = map(str, (WARM_UP_STEPS, STEPS))
    words = [*launcher(cell), "-m", STEP_PROFILE, "profile", *numbered, *kept]
    watched = watch([PYTHON, *words], settings.folder, run, settings.limit)
    record = {"cell_command": shown(words), **outcome_of(watched, settings.limit)}
    if record["status"] == "ok":
        record |= described(run)
    return record | {"cell_seconds": round(watched.seconds, 1)}


def described(run: Path) -> Record:
    """Figures per step of the trace in a folder."""
    steps = json.loads((run / "steps.json").read_text())
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    seconds = steps["seconds"] / steps["steps"]
    record: Record = {
        "profiled_steps": steps["steps"],
        "step_ms": round(1e3 * seconds, 3),
        "model_tflop": round(steps["model_flops"] / steps["steps"] / 1e12, 3),
        "matrix_ceiling_share": round(steps["model_flops"] / steps["seconds"] / GEMM_FLOPS, 4),
    }
    return record | summarize(events, steps["steps"])
