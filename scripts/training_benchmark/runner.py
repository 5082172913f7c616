"""The process of one cell: started, watched, and turned into a record."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from head_benchmark.runner import read_records
from head_benchmark.timing import CONDITIONS
from training_benchmark import figures
from training_benchmark.commands import PYTHON, Place, command, environment, shown
from training_benchmark.suites import OURS, WARM_UP_WINDOWS, Cell, plan
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


class Watched:
    """What was seen of a process while it ran, in the order of the lines of its log.

    Attributes:
        code: its exit code, None if it was given up.
        seconds: it took.
        arrivals: seconds after its start at which each line was seen.
        recompiled: how often torch.compile had compiled anew by then.
        conditions: of the GPU, in the first window after the warm-up.
    """

    def __init__(self, run: Path) -> None:
        self.metrics, self.errors = run / "metrics.jsonl", run / "errors.txt"
        self.code: int | None = None
        self.seconds = 0.0
        self.arrivals: list[float] = []
        self.recompiled: list[int] = []
        self.conditions: Record = {}

    def look(self, seconds: float) -> None:
        """Once more, ``seconds`` after the start."""
        new = len(read_records(self.metrics)) - len(self.arrivals)
        if not new:
            return
        self.arrivals += [seconds] * new
        self.recompiled += [self.said().count("Recompiling function")] * new
        if len(self.arrivals) > WARM_UP_WINDOWS and not self.conditions:
            self.conditions = gpu_conditions()

    def said(self) -> str:
        """All of its standard error."""
        return self.errors.read_text(errors="replace")


def run_cell(cell: Cell, settings: Settings) -> Record:
    """The record of a cell, but for what concerns the whole run."""
    found = plan(cell, settings.seconds, settings.miniature)
    kinds = found.vocabulary, cell.activity, found.lengths
    model, pairs = prepare(settings.folder, *kinds, settings.miniature)
    run = settings.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    words = command(cell, found, Place(model, pairs, "run"), settings.miniature)
    watched = watch([PYTHON, *words], settings.folder, run, settings.limit)
    record: Record = {"cell_command": shown(words), "log_every": found.log_every}
    lines = read_records(run / "metrics.jsonl")
    record |= {**outcome_of(watched, settings.limit), **watched.conditions}
    if record["status"] == "ok":
        record |= figures.summary(lines, watched.arrivals, watched.recompiled, found.log_every)
    if cell.system == OURS and (run / "manifest.json").exists():
        record["config"] = json.loads((run / "manifest.json").read_text())["config"]
    return record | {"cell_seconds": round(watched.seconds, 1)}


def watch(words: list[str], folder: Path, run: Path, limit: float) -> Watched:
    """Run a command in ``folder`` until it ends or ``limit`` seconds have passed."""
    watched = Watched(run)
    begin = time.perf_counter()
    with watched.errors.open("w") as errors, (run / "output.txt").open("w") as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment(folder),
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            while (code := process.poll()) is None and time.perf_counter() - begin < limit:
                watched.look(time.perf_counter() - begin)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    watched.code, watched.seconds = code, time.perf_counter() - begin
    watched.look(watched.seconds)
    return watched


def gpu_conditions() -> Record:
    """Clock, power and temperature of the first GPU now; nothing where nvidia-smi cannot tell."""
    query = f"--query-gpu={','.join(CONDITIONS.values())}"
    words = ("nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0")
    try:
        answer = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return dict(zip(CONDITIONS, map(float, answer.split(",")), strict=True))
    except (OSError, ValueError, subprocess.CalledProcessError):
        return {}


def outcome_of(watched: Watched, limit: float) -> Record:
    """ok, oom, failed or timeout, with what the process said last."""
    if watched.code is None:
        return {"status": "timeout", "error": f"not done after {limit:.0f} s"}
    if watched.code == 0:
        return {"status": "ok"}
    said = [line.strip() for line in watched.said().splitlines() if line.strip()]
    exhausted = [line for line in said if "OutOfMemoryError" in line]
    if exhausted:
        return {"status": "oom", "error": exhausted[-1][:400]}
    reason = next(
        (line for line in reversed(said) if "Error" in line), (said or ["no message"])[-1]
    )
    return {"status": "failed", "error": f"exit code {watched.code}: {reason[:400]}"}
