"""Cells one after the other, each in a process of its own; records as they come.

While one cell measures, the processes of the next ones import their libraries and wait.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from head_benchmark.cells import Record, Settings
from head_benchmark.suites import GEMMS, TRUTH, Cell
from sparton.training.loggers import whole_lines

SCRIPTS = Path(__file__).resolve().parents[1]
CELL_LIMIT_SECONDS = 240.0
# Importing transformers and filling a backbone takes longer than measuring a cell.
AHEAD = max(1, min(3, (os.cpu_count() or 1) // 4))


class Worker:
    """A started process that waits for :meth:`finish` before it touches the device."""

    def __init__(self, cell: Cell, settings: Settings) -> None:
        self.cell = cell
        paths = (str(SCRIPTS), os.environ.get("PYTHONPATH", ""), str(SCRIPTS.parent))
        self._process = subprocess.Popen(
            (
                sys.executable,
                "-m",
                "head_benchmark.worker",
                json.dumps(cell._asdict()),
                json.dumps(settings._asdict()),
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )

    def finish(self, limit: float = CELL_LIMIT_SECONDS) -> Record:
        """Let the process measure, and wait for its record, or for a record of its failure."""
        begin = time.perf_counter()
        try:
            output, errors = self._process.communicate("go\n", timeout=limit)
        except subprocess.TimeoutExpired:
            self.stop()
            return {"status": "timeout", "error": f"not done after {limit:.0f} s"}
        elapsed = {"cell_seconds": round(time.perf_counter() - begin, 2)}
        lines = output.splitlines()
        if self._process.returncode or not lines:
            said = [line.strip() for line in errors.splitlines() if line.strip()]
            reason = said[-1][:400] if said else "no message"
            error = f"exit code {self._process.returncode}: {reason}"
            return {"status": "crashed", "error": error, **elapsed}
        return json.loads(lines[-1]) | elapsed

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def with_truths(cells: Sequence[Cell], settings: Settings) -> list[Cell]:
    """The cells in their order, and before the first of each problem the cell that computes its
    truth, unless it is on disk."""
    ready: set[Cell] = set()
    jobs = []
    for cell in cells:
        truth = cell.truth()
        needed = cell.head not in GEMMS and truth not in ready
        if needed and not settings.truth_file(cell).exists():
            jobs.append(truth)
        ready |= {truth} if needed else set()
        jobs.append(cell)
    return jobs


def run_cells(
    jobs: Sequence[Cell], settings: Settings, deadline: float = float("inf")
) -> Iterator[tuple[Cell, Record]]:
    """Measure every job in order; none is begun after ``deadline`` (of time.monotonic)."""
    failures: dict[Cell, str] = {}
    workers: list[Worker] = []
    try:
        for number in range(len(jobs)):
            if time.monotonic() > deadline:
                return
            started = number + len(workers)
            coming = jobs[started : number + 1 + AHEAD]
            workers += [Worker(cell, settings) for cell in coming]
            record = workers[0].finish()
            cell = workers.pop(0).cell
            if cell.head == TRUTH and record["status"] != "ok":
                failures[cell] = str(record.get("error", record["status"]))
            elif record["status"] == "crashed" and cell.truth() in failures:
                record["error"] = f"no truth to compare with: {failures[cell.truth()]}"
            yield cell, record
    finally:
        for worker in workers:
            worker.stop()


def read_records(path: Path) -> list[Record]:
    """Records of a file; a last line that a kill cut off is left out."""
    return [json.loads(line) for line in whole_lines(path)]


def write_records(path: Path, records: Sequence[Record]) -> None:
    """The file anew, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    lines = [json.dumps(record) + "\n" for record in records]
    unfinished.write_text("".join(lines), encoding="utf-8")
    unfinished.replace(path)


def append_record(path: Path, record: Record) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def cell_of(record: Record) -> Cell:
    return Cell(**{field: record[field] for field in Cell._fields})


def outcome(label: str, found: str, record: Record) -> str:
    """One line for the screen: what was found of a cell, what its gate refused or its error said,
    and how long that took."""
    if record["status"] == "red_gate":
        judged = [(name, e, record["allowed"][name]) for name, e in record["errors"].items()]
        found += ": " + ", ".join(f"{n} {e:.2g} > {a:.2g}" for n, e, a in judged if not e <= a)
    error = f": {record['error']}" if "error" in record else ""
    return f"{label}: {found}{error}  [{record.get('cell_seconds', 0):.1f} s]"
