"""A command that is watched while it trains, and what became of it."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import read_records
from benchmarks.screen import Record
from benchmarks.timing import ask_conditions, read_conditions
from benchmarks.training.commands import environment
from benchmarks.training.suites import WARM_UP_WINDOWS

POLL_SECONDS = 0.05


class Watched:
    """What was seen of a process while it ran, in the order of the lines of its log.

    Attributes:
        run: the folder of the run.
        code: its exit code.
        arrivals: seconds after its start at which each line was seen.
        recompiled: how often torch.compile had compiled anew by then.
        conditions: of the GPU, in the first window after the warm-up.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.errors = run, run / "errors.txt"
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
        if len(self.arrivals) > WARM_UP_WINDOWS and not self.conditions:
            self.conditions = read_conditions(ask_conditions(0.0, "0"))

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


def watch(words: Sequence[str], folder: Path, run: Path) -> Watched:
    """Run a command in ``folder`` until it ends."""
    watched = Watched(run)
    begin = time.perf_counter()
    with watched.errors.open("w") as errors, (run / "output.txt").open("w") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=environment(folder), stdout=output, stderr=errors
        )
        while (code := process.poll()) is None:
            watched.look(time.perf_counter() - begin)
            time.sleep(POLL_SECONDS)
    watched.code = code
    watched.look(time.perf_counter() - begin)
    return watched
