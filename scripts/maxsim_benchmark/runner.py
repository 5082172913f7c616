"""Runs the cells of each shape in a process; a crash or a hang costs one cell."""

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
CELL_LIMIT_SECONDS = 90.0


def run_cells(
    cells: Sequence[Cell], settings: Settings, deadline: float = float("inf")
) -> Iterator[tuple[Cell, Record]]:
    """Measure every cell in order; no process is begun after ``deadline`` (of time.monotonic), and
    none goes on with another cell."""
    for _, group in groupby(cells, key=lambda cell: cell.shape):
        left = list(group)
        while left:
            if time.monotonic() > deadline:
                return
            failure: Record | None = None
            for record in _process(tuple(left), settings):
                if record["status"] in ("crashed", "timeout"):
                    failure = record
                yield left.pop(0), record
                if time.monotonic() > deadline:
                    return
            if failure is None:
                break


def _process(cells: Sequence[Cell], settings: Settings) -> Iterator[Record]:
    """Records of the first cells, the last of them that of a failure unless all were measured."""
    paths = (str(SCRIPTS), os.environ.get("PYTHONPATH", ""), str(SCRIPTS.parent))
    words = (sys.executable, "-m", "maxsim_benchmark.worker")
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            (*words, json.dumps(cells), json.dumps(settings._asdict())),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        assert process.stdout is not None
        try:
            for _ in cells:
                late = threading.Event()
                line = _line(process, late)
                if not line.endswith("\n"):
                    yield _failure(process, late.is_set(), errors)
                    return
                yield json.loads(line)
        finally:
            process.kill()
            process.wait()


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
