"""The process of one cell: started, watched, and turned into a record."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from training_benchmark import figures
from training_benchmark.commands import PYTHON, Place, command, environment, shown
from training_benchmark.suites import OURS, Cell, plan
from training_benchmark.workload import prepare

Record = dict[str, Any]
POLL_SECONDS = 0.05
CELL_LIMIT_SECONDS = 420.0


class Settings(NamedTuple):
    """What all cells of a run have in common.

    Attributes:
        folder: of the workload and of the runs.
        seconds: how long a cell is measured after its warm-up.
        miniature: a tiny model and tiny texts.
        limit: seconds after which a cell is given up.
    """

    folder: Path
    seconds: float = 20.0
    miniature: bool = False
    limit: float = CELL_LIMIT_SECONDS


class Watched(NamedTuple):
    """What was seen of a process.

    Attributes:
        code: its exit code, None if it was given up.
        seconds: it took.
        arrivals: seconds after its start at which each line of its log was seen.
        recompiled: how often torch.compile had compiled anew when each of them was.
        errors: all that it wrote to standard error.
    """

    code: int | None
    seconds: float
    arrivals: list[float]
    recompiled: list[int]
    errors: str


def run_cell(cell: Cell, settings: Settings) -> Record:
    """The record of a cell, but for what concerns the whole run."""
    found = plan(cell, settings.seconds, settings.miniature)
    model, pairs = prepare(settings.folder, found.vocabulary, found.lengths, settings.miniature)
    run = settings.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    words = command(cell, found, Place(model, pairs, "run"), settings.miniature)
    watched = watch([PYTHON, *words], settings.folder, run, settings.limit)
    record: Record = {"cell_command": shown(words), "log_every": found.log_every}
    lines = figures.read_lines(run / "metrics.jsonl")
    record |= outcome_of(watched, settings.limit)
    if record["status"] == "ok":
        record |= figures.summary(lines, watched.arrivals, watched.recompiled, found.log_every)
    if cell.system == OURS and (run / "manifest.json").exists():
        record["config"] = json.loads((run / "manifest.json").read_text())["config"]
    return record | {"cell_seconds": round(watched.seconds, 1)}


def watch(words: list[str], folder: Path, run: Path, limit: float) -> Watched:
    """Run a command in ``folder`` until it ends or ``limit`` seconds have passed."""
    metrics, errors = run / "metrics.jsonl", run / "errors.txt"
    arrivals: list[float] = []
    recompiled: list[int] = []
    begin = time.perf_counter()
    with errors.open("w") as err, (run / "output.txt").open("w") as out:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment(folder),
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            while (code := process.poll()) is None and time.perf_counter() - begin < limit:
                new = len(figures.read_lines(metrics)) - len(arrivals)
                if new:
                    arrivals += [time.perf_counter() - begin] * new
                    recompiled += [_count_recompilations(errors)] * new
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    new = len(figures.read_lines(metrics)) - len(arrivals)
    arrivals += [time.perf_counter() - begin] * new
    recompiled += [_count_recompilations(errors)] * new
    seconds = time.perf_counter() - begin
    return Watched(code, seconds, arrivals, recompiled, errors.read_text(errors="replace"))


def outcome_of(watched: Watched, limit: float) -> Record:
    """ok, oom, failed or timeout, with what the process said last."""
    if watched.code is None:
        return {"status": "timeout", "error": f"not done after {limit:.0f} s"}
    if watched.code == 0:
        return {"status": "ok"}
    said = [line.strip() for line in watched.errors.splitlines() if line.strip()]
    exhausted = [line for line in said if "OutOfMemoryError" in line]
    if exhausted:
        return {"status": "oom", "error": exhausted[-1][:400]}
    reason = next(
        (line for line in reversed(said) if "Error" in line), (said or ["no message"])[-1]
    )
    return {"status": "failed", "error": f"exit code {watched.code}: {reason[:400]}"}


def _count_recompilations(errors: Path) -> int:
    return errors.read_text(errors="replace").count("Recompiling function")
