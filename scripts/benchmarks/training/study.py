"""From the cells of trainings to their records."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks.records import read_records
from benchmarks.screen import Columns, Record, figure
from benchmarks.study import Measured, Settings, Study
from benchmarks.training import figures
from benchmarks.training.commands import Place, command, shown
from benchmarks.training.suites import SUITES, Cell, Plan, plan
from benchmarks.training.watching import Watched, watch
from benchmarks.training.workload import prepare
from sparton.training.manifest import installed_version

PACKAGES = ("transformers", "sentence-transformers", "datasets", "accelerate")


class TrainingStudy(Study[Cell]):
    """Speed and memory of whole training runs: ours, as ``python train.py`` runs them, and those of
    sentence-transformers' trainers on the same texts from the same model folder.

    Suites are data, in benchmarks/training/suites.py. Every cell is a command of its own, with real
    logging, optimizer and loading from files; the figures are medians over the windows of its log
    after a warm-up. Losses that cannot be believed have the status red_gate.
    """

    name = "training"
    cell = Cell
    seconds = 20.0
    limit = 420.0
    suites_apart = True
    columns: ClassVar[Columns] = {
        "pairs/s": figure("examples_per_second_p50", ",.0f"),
        "step ms": figure("step_ms_p50", ".1f"),
        "wait ms": figure("data_wait_ms", ".1f"),
        "GiB": figure("peak_allocated_gib", ".1f"),
        "reserved": figure("peak_reserved_gib", ".1f"),
        "MFU": figure("mfu", ".1%"),
        "start s": figure("seconds_to_first_step", ".0f"),
        "recompiled": figure("recompilations_after_warm_up"),
        "loss": figure("loss_first", ".3f"),
        "last": figure("loss_last", ".3f"),
    }

    def suites(self, settings: Settings) -> dict[str, list[Cell]]:
        return SUITES

    def context(self, suite: str, settings: Settings) -> Record:
        versions = {package: installed_version(package) for package in PACKAGES}
        return {"cpus": os.cpu_count(), "versions": versions}

    def prepare(self, cells: Sequence[Cell], settings: Settings) -> Callable[[Cell], Measured]:
        return partial(self.measure, settings=settings)

    def measure(self, cell: Cell, settings: Settings) -> Record:
        """A cell that this machine has too few GPUs for is absent."""
        if settings.device == "cuda" and cell.gpus > torch.cuda.device_count():
            return {"status": "absent", "error": f"{torch.cuda.device_count()} GPUs are here"}
        folder = Path(settings.folder)
        found = plan(cell, settings.seconds, settings.miniature)
        kinds = found.vocabulary, cell.activity, found.lengths
        place = Place(*prepare(folder, *kinds, settings.miniature), "run")
        run = folder / place.run
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        words = self.command(cell, found, place, settings)
        watched = watch([sys.executable, *words], folder, run)
        record = {"cell_command": shown(words), **watched.outcome(), **watched.conditions}
        if (run / "manifest.json").exists():
            record["config"] = json.loads((run / "manifest.json").read_text())["config"]
        return record | (self.figures(found, watched) if record["status"] == "ok" else {})

    def command(self, cell: Cell, found: Plan, place: Place, settings: Settings) -> list[str]:
        """The words that start a cell, after that of the interpreter."""
        return command(cell, found, place, settings.miniature)

    def figures(self, found: Plan, watched: Watched) -> Record:
        """What a cell that ended well left in the folder of its run."""
        lines = read_records(watched.run / "metrics.jsonl")
        seen = watched.arrivals, watched.recompiled, found.log_every
        return {"log_every": found.log_every, **figures.summary(lines, *seen)}

    def objection(
        self, cell: Cell, record: Record, earlier: Sequence[tuple[Cell, Record]]
    ) -> str | None:
        return figures.objection(cell, record, earlier)

    def words(self, record: Record) -> str:
        low, middle, high = (record[f"examples_per_second_p{q}"] for q in (20, 50, 80))
        found = f"{middle:,.0f} pairs/s ({low:,.0f} to {high:,.0f})"
        memory = self.columns["GiB"](record)
        return f"{found}, {memory} GiB" if memory else found


STUDY = TrainingStudy()
