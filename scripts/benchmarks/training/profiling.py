"""The record of a profile: what the GPU did in a few steps, and what it waited for."""

import json
from collections.abc import Sequence
from typing import ClassVar

from benchmarks.screen import Columns, Record, figure
from benchmarks.study import Settings
from benchmarks.training.commands import STEP_PROFILE, Place, launcher, overrides
from benchmarks.training.figures import STEPS_SHOWN
from benchmarks.training.study import TrainingStudy, Watched
from benchmarks.training.suites import OURS, SUITES, Cell, Plan
from benchmarks.training.trace import summarize

WARM_UP_STEPS, STEPS = 12, 10
# A product of large bf16 matrices on an H200, back to back: what no training step can exceed.
GEMM_FLOPS = 790e12


class ProfileStudy(TrainingStudy):
    """A few steps of our trainings: how busy the GPU is, with what, and how often the host waits
    for it."""

    name = "training_profile"
    columns: ClassVar[Columns] = {
        **STEPS_SHOWN,
        "idle ms": figure("idle_ms", ".2f"),
        "launches": figure("launches", ".0f"),
        "copies to host": figure("copies_to_host", ".1f"),
    }

    def suites(self, settings: Settings) -> dict[str, list[Cell]]:
        return {
            suite: [cell for cell in cells if cell.system == OURS]
            for suite, cells in SUITES.items()
        }

    def command(self, cell: Cell, found: Plan, place: Place, settings: Settings) -> list[str]:
        # A step more than are profiled: what a run does at its end is no part of a step.
        run = found._replace(log_every=WARM_UP_STEPS + STEPS + 1, windows=1)
        words = overrides(cell, run, place, settings.miniature)
        kept = [word for word in words if not word.startswith("hydra.")]
        numbers = map(str, (WARM_UP_STEPS, STEPS))
        return [*launcher(cell), "-m", STEP_PROFILE, place.run, *numbers, *kept]

    def figures(self, found: Plan, watched: Watched) -> Record:
        """Figures per step of the trace."""
        steps = json.loads((watched.run / "steps.json").read_text())
        events = json.loads((watched.run / "trace.json").read_text())["traceEvents"]
        seconds = steps["seconds"] / steps["steps"]
        record = {
            "profiled_steps": steps["steps"],
            "step_ms": round(1e3 * seconds, 3),
            "model_tflop": round(steps["model_flops"] / steps["steps"] / 1e12, 3),
            "matrix_ceiling_share": round(steps["model_flops"] / steps["seconds"] / GEMM_FLOPS, 4),
        }
        return record | summarize(events, steps["steps"])

    def objection(
        self, cell: Cell, record: Record, earlier: Sequence[tuple[Cell, Record]]
    ) -> str | None:
        return None

    def words(self, record: Record) -> str:
        found = f"{record['step_ms']:.1f} ms, GPU busy {record['busy_share']:.1%}; ms: "
        spent = sorted(record["families_ms"].items(), key=lambda item: -item[1])
        return found + ", ".join(f"{family} {ms:.1f}" for family, ms in spent if ms)


STUDY = ProfileStudy()
