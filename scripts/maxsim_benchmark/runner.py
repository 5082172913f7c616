"""Runs the cells of each shape in a process; a crash or a hang costs one cell."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TextIO

from maxsim_benchmark.providers import Cell
from maxsim_benchmark.worker import Record, Settings

SCRIPTS = Path(__file__).resolve().parents[1]
CELL_LIMIT_SECONDS = 60.0
STARTED_TOGETHER = 8


class Process:
    """A started process of one shape, which waits for :meth:`records` before it touches the
    device."""

    def __init__(self, cells: Sequence[Cell], settings: Settings) -> None:
        self.cells = tuple(cells)
        paths = (str(SCRIPTS), os.environ.get("PYTHONPATH", ""), str(SCRIPTS.parent))
        words = (sys.executable, "-m", "maxsim_benchmark.worker")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by stop)
        self._process = subprocess.Popen(
            (*words, json.dumps(self.cells), json.dumps(settings._asdict())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )

    def wait(self) -> None:
        """Until it has imported its libraries, or died."""
        _line(self._process, threading.Event())

    def records(self) -> Iterator[Record]:
        """Records of the first cells, the last of them that of a failure unless all were
        measured."""
        assert self._process.stdin is not None
        # A process that died already says so by having no line to give.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        for _ in self.cells:
            late = threading.Event()
            line = _line(self._process, late)
            if not line.endswith("\n"):
                yield _failure(self._process, late.is_set(), self._errors)
                return
            yield json.loads(line)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


def run_cells(
    cells: Sequence[Cell], settings: Settings, deadline: float = float("inf")
) -> Iterator[tuple[Cell, Record]]:
    """Measure every cell in order; no process is begun after ``deadline`` (of time.monotonic), and
    none goes on with another cell."""
    left = list(cells)
    started: list[Process] = []
    try:
        while left:
            if time.monotonic() > deadline:
                return
            shapes = [tuple(group) for _, group in groupby(left, key=lambda cell: cell.shape)]
            # After a failure the cells left of a shape need a process of their own first.
            if started and started[0].cells != shapes[0]:
                started.insert(0, Process(shapes[0], settings))
                started[0].wait()
            # Several import their libraries at once, and none does while another measures: calls
            # bound by the host would take twice their time.
            if not started:
                started = [Process(cells, settings) for cells in shapes[:STARTED_TOGETHER]]
                for process in started:
                    process.wait()
            for record in started[0].records():
                yield left.pop(0), record
                if time.monotonic() > deadline:
                    return
            started.pop(0).stop()
    finally:
        for process in started:
            process.stop()


def _line(process: subprocess.Popen, late: threading.Event) -> str:
    """The next line of a process, which is killed if it takes too long."""

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(CELL_LIMIT_SECONDS, stop)
    timer.start()
    try:
        assert process.stdout is not None
        return process.stdout.readline()
    finally:
        timer.cancel()


def _failure(process: subprocess.Popen, late: bool, errors: TextIO) -> Record:
    code = process.wait()
    if late:
        return {"status": "timeout", "error": f"not done after {CELL_LIMIT_SECONDS:.0f} s"}
    errors.seek(0)
    said = [line.strip() for line in errors if line.strip()]
    reason = said[-1][:400] if said else "no message"
    return {"status": "crashed", "error": f"exit code {code}: {reason}"}
