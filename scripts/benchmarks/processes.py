"""Cells one after the other, in processes of their own; a crash or a hang costs one cell.

``python -m benchmarks.processes STUDY CELLS SETTINGS`` is such a process: it imports and prepares
what its cells need, writes a line when it could begin, waits for a line on standard input, and
writes a line of JSON to standard output for each cell, its records.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.gate import outcome
from benchmarks.screen import Record
from benchmarks.study import C, Settings, Study, load_study

SCRIPTS = Path(__file__).resolve().parents[1]
STARTED_TOGETHER = max(1, min(8, (os.cpu_count() or 1) // 2))


class Worker:
    """A started process of some cells, which waits for :meth:`answers` before it touches the
    device."""

    def __init__(self, study: Study[Any], cells: Sequence[Any], settings: Settings) -> None:
        self.cells, self.limit, self.late = tuple(cells), study.limit, False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by stop)
        self._process = subprocess.Popen(
            (
                sys.executable,
                "-m",
                "benchmarks.processes",
                study.name,
                json.dumps(self.cells),
                json.dumps(settings._asdict()),
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )

    def wait(self) -> None:
        """Until it has prepared what it needs, or died."""
        self._line()

    def answers(self) -> Iterator[list[Record]]:
        """The records of the first cells, those of the last of them say how it failed unless all
        were measured."""
        assert self._process.stdin is not None
        # A process that died already says so by having no line to give.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        for _ in self.cells:
            begin, line = time.perf_counter(), self._line()
            if not line.endswith("\n"):
                seconds = round(time.perf_counter() - begin, 2)
                yield [{**self._failure(), "cell_seconds": seconds}]
                return
            yield json.loads(line)

    def stop(self) -> None:
        self._kill()
        self._process.wait()
        self._errors.close()

    def _kill(self) -> None:
        """With what it has started."""
        self.late = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _line(self) -> str:
        """Its next line; it is killed if that takes too long."""
        timer = threading.Timer(self.limit, self._kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            return self._process.stdout.readline()
        finally:
            timer.cancel()

    def _failure(self) -> Record:
        code = self._process.wait()
        if self.late:
            return {"status": "timeout", "error": f"not done after {self.limit:.0f} s"}
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        reason = said[-1][:400] if said else "no message"
        return {"status": "crashed", "error": f"exit code {code}: {reason}"}


def python_path() -> str:
    """Where a process of a benchmark finds its modules."""
    paths = (str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(filter(None, paths))


def run_cells(
    study: Study[C], cells: Sequence[C], settings: Settings, deadline: float = float("inf")
) -> Iterator[tuple[C, list[Record]]]:
    """Measure every cell in order; nothing is begun after ``deadline`` (of time.monotonic)."""
    left = list(cells)
    started: dict[tuple[C, ...], Worker] = {}
    try:
        while left and time.monotonic() <= deadline:
            groups = [tuple(group) for _, group in groupby(left, key=study.process_of)]
            for records in _next_worker(study, groups, settings, started).answers():
                yield left.pop(0), records
                if time.monotonic() > deadline:
                    return
            started.pop(groups[0]).stop()
    finally:
        for worker in started.values():
            worker.stop()


def _next_worker(
    study: Study[C],
    groups: Sequence[tuple[C, ...]],
    settings: Settings,
    started: dict[tuple[C, ...], Worker],
) -> Worker:
    """The process of the first group. Several import their libraries at once, and none does while
    another measures: calls bound by the host would take twice their time."""
    if groups[0] not in started:
        # After a failure the cells left of a group need a process of their own first.
        coming = groups[:1] if started else groups[:STARTED_TOGETHER]
        fresh = {group: Worker(study, group, settings) for group in coming}
        started |= fresh
        for worker in fresh.values():
            worker.wait()
    return started[groups[0]]


def main(words: Sequence[str]) -> None:
    # Libraries may print; standard output is for the records alone.
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    study = load_study(words[0])
    listed, values = (json.loads(text) for text in words[1:])
    settings, cells = Settings(**values), [study.cell(*fields) for fields in listed]
    measure = study.prepare(cells, settings)
    answer.write("ready\n")
    if not sys.stdin.readline():
        sys.exit("nobody waits for these cells any more")
    torch.backends.cuda.matmul.allow_tf32 = False
    for cell in cells:
        begin = time.perf_counter()
        records = outcome(lambda: measure(cell))  # noqa: B023 (called at once)
        seconds = round(time.perf_counter() - begin, 2)
        answer.write(json.dumps([{**record, "cell_seconds": seconds} for record in records]) + "\n")
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    # Tearing down CUDA in order takes longer than many a measurement.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
