"""From the cells of trainings to their records."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks.records import read_records
from benchmarks.screen import Columns, Record, figure
from benchmarks.study import Measured, Settings, Study
from benchmarks.timing import ask_conditions, device_id, read_conditions
from benchmarks.training import figures
from benchmarks.training.commands import Place, attention, command, environment, shown
from benchmarks.training.suites import SUITES, WARM_UP_WINDOWS, Cell, plan
from benchmarks.training.workload import prepare
from sparton.training.manifest import installed_version
from sparton.training.profiling import FILE as PROFILE

POLL_SECONDS = 0.05
PACKAGES = ("transformers", "sentence-transformers", "datasets", "accelerate")


class Watched:
    """What was seen of a process while it ran, in the order of the lines of its log.

    Attributes:
        run: the folder of the run.
        code: its exit code.
        arrivals: seconds after its start at which each line was seen.
        recompiled: how often torch.compile had compiled anew by then.
        conditions: of the GPU that nvidia-smi calls so, in the first window after the warm-up.
    """

    def __init__(self, run: Path, device: str | None) -> None:
        self.run, self.errors, self.device = run, run / "errors.txt", device
        self.code = 0
        self.arrivals: list[float] = []
        self.recompiled: list[int] = []
        self.conditions: Record = {}

    def look(self, seconds: float) -> None:
        """Once more, ``seconds`` after the start."""
        new = len(read_records(self.run / "metrics.jsonl")) - len(self.arrivals)
        if not new:
            return
        self.arrivals += [seconds] * new
        self.recompiled += [self.said().count("Recompiling function")] * new
        if self.device and len(self.arrivals) > WARM_UP_WINDOWS and not self.conditions:
            self.conditions = read_conditions(ask_conditions(0.0, self.device))

    def said(self) -> str:
        """All of its standard error."""
        return self.errors.read_text(errors="replace")

    def outcome(self) -> Record:
        """ok, oom or failed, with what the process said last."""
        if self.code == 0:
            return {"status": "ok"}
        said = [line.strip() for line in self.said().splitlines() if line.strip()]
        exhausted = [line for line in said if "OutOfMemoryError" in line]
        if exhausted:
            return {"status": "oom", "error": exhausted[-1][:400]}
        reason = next(
            (line for line in reversed(said) if "Error" in line), (said or ["no message"])[-1]
        )
        return {"status": "failed", "error": f"exit code {self.code}: {reason[:400]}"}


def watch(
    words: Sequence[str], folder: Path, run: Path, gpus: int = 1, device: str | None = None
) -> Watched:
    """Run a command in ``folder`` until it ends.

    Args:
        gpus: how many of those that are visible it sees, the first ones.
        device: nvidia-smi's name of the first of them; None for a CPU.
    """
    watched = Watched(run, device)
    begin = time.perf_counter()
    with watched.errors.open("w") as errors, (run / "output.txt").open("w") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=environment(folder, gpus), stdout=output, stderr=errors
        )
        while (code := process.poll()) is None:
            watched.look(time.perf_counter() - begin)
            time.sleep(POLL_SECONDS)
    watched.code = code
    watched.look(time.perf_counter() - begin)
    return watched


class TrainingStudy(Study[Cell]):
    """Speed and memory of whole training runs: ours, as ``python train.py`` runs them, and those of
    sentence-transformers' trainers on the same texts from the same model folder, as they are and
    with our drop-ins.

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
        **figures.SHOWN,
        "reserved GiB": figure("peak_reserved_gib", ".1f"),
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
        place = Place(*prepare(folder, cell, found, settings.miniature), "run")
        run = folder / place.run
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        words = command(cell, found, place, settings.miniature)
        device = device_id() if settings.device == "cuda" else None
        watched = watch([sys.executable, *words], folder, run, cell.gpus, device)
        record = {"cell_command": shown(words), **watched.outcome(), **watched.conditions}
        if (attends := attention(cell)) is not None:
            record["attention"] = attends
        if (run / "manifest.json").exists():
            record["config"] = json.loads((run / "manifest.json").read_text())["config"]
        if record["status"] != "ok":
            return record
        if (run / PROFILE).exists():
            record["profile"] = figures.profile(json.loads((run / PROFILE).read_text()))
        lines, seen = read_records(run / "metrics.jsonl"), (watched.arrivals, watched.recompiled)
        summary = figures.summary(lines, *seen, found.log_every)
        return {**record, "log_every": found.log_every, **summary}

    def objection(
        self, cell: Cell, record: Record, earlier: Sequence[tuple[Cell, Record]]
    ) -> str | None:
        return figures.objection(cell, record, earlier)

    def words(self, record: Record) -> str:
        low, middle, high = (record[f"examples_per_second_p{q}"] for q in (20, 50, 80))
        found = f"{middle:,.0f} pairs/s ({low:,.0f} to {high:,.0f})"
        memory = self.columns["peak GiB"](record)
        return f"{found}, {memory} GiB" if memory else found


STUDY = TrainingStudy()
