"""The command line of every study: what is asked for, what is left of it, and where it goes."""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from rich.console import Console

from benchmarks.processes import run_cells
from benchmarks.records import (
    append_records,
    cell_of,
    code_digest,
    discard,
    folder_of,
    record_environment,
    records_of_run,
    resume,
)
from benchmarks.screen import Record, describe, result_table
from benchmarks.study import STUDIES, C, Settings, Study, load_study

ROOT = Path(__file__).resolve().parents[2]


def main(words: Sequence[str], description: str | None = None) -> None:
    chooser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chooser.add_argument("study", choices=STUDIES, help="STUDY --help names its options")
    study = load_study(chooser.parse_args(words[:1]).study)
    arguments, settings, cells = parse_arguments(study, words[1:])
    console = Console(width=None if os.isatty(1) else 160)
    if arguments.list:
        for suite, listed in cells.items():
            console.print(f"{suite}: {len(listed)} cells")
            for cell in listed:
                console.print(f"  {cell.label}", highlight=False, markup=False)
        return
    machine = record_environment(on_gpu=settings.device == "cuda")
    folder = arguments.results / folder_of(machine["gpu"])
    paths = {s: arguments.output or folder / f"{study.file_of(s)}.jsonl" for s in cells}
    shared = {**machine, "seed": 0, "miniature": settings.miniature, "seconds": settings.seconds}
    contexts = {s: {"suite": s, **shared, **study.context(s, settings)} for s in cells}
    for path in set(paths.values()) if arguments.fresh else ():
        discard(study, cells, path)
    for suite, path in paths.items():
        resume(study, path, contexts[suite], set(cells[suite]))
    with alone_in(Path(settings.folder)):
        for suite, path in paths.items():
            deadline = arguments.deadline
            run_suite(study, cells[suite], settings, contexts[suite], path, deadline, console)
    if Path(settings.folder).exists():
        console.print(f"what cells left for others is in {settings.folder}", soft_wrap=True)


def parse_arguments(
    study: Study[C], words: Sequence[str]
) -> tuple[argparse.Namespace, Settings, dict[str, list[C]]]:
    """Arguments, the settings that follow from them, and the cells asked for, by suite."""
    parser = argparse.ArgumentParser(
        prog=f"benchmark.py {study.name}",
        description=study.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    gpu = study.needs_gpu or torch.cuda.is_available()
    add = parser.add_argument
    add("--suite", nargs="+", help="needed where there are several")
    add("--only", default="", metavar="REGEX", help="only cells in whose name this is found")
    add("--results", type=Path, default=ROOT / "results", metavar="FOLDER")
    add("--output", type=Path, metavar="FILE", help="JSONL, in place of those in --results")
    add("--fresh", action="store_true", help="discard the run's records first")
    add("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    add("--seconds", type=float, default=study.seconds, help="timing of a cell")
    add("--folder", type=Path, help="of what cells leave for others; default: a temporary one")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    add("--miniature", action="store_true", help="tiny problems, to try the program")
    add("--list", action="store_true", help="show the cells, measure nothing")
    for name, option in study.options.items():
        add(f"--{name}", **option)
    arguments = parser.parse_args(words)
    arguments.deadline = time.monotonic() + arguments.stop_after
    if arguments.miniature and not (arguments.output or arguments.list):
        parser.error("figures of a miniature do not belong in results/: name a file with --output")
    if arguments.device == "cuda" and not torch.cuda.is_available() and not arguments.list:
        parser.error("no CUDA device; --device cpu --miniature tries the program without one")
    settings = Settings(
        device=arguments.device,
        seconds=arguments.seconds,
        folder=str(arguments.folder or default_folder(study.name, arguments.miniature)),
        miniature=arguments.miniature,
        options={name: getattr(arguments, name) for name in study.options},
    )
    try:
        suites = study.suites(settings)
    except ValueError as error:
        parser.error(str(error))
    asked = arguments.suite or (list(suites) if len(suites) == 1 else [])
    if not asked or set(asked) - set(suites):
        parser.error(f"--suite {' '.join(asked)}: choose from {', '.join(suites)}")
    found = {
        suite: [c for c in suites[suite] if re.search(arguments.only, c.label)] for suite in asked
    }
    if not any(found.values()):
        parser.error(f"--only {arguments.only}: no such cell; --list without it names them")
    return arguments, settings, found


def default_folder(study: str, miniature: bool) -> Path:
    """A temporary folder that other code or another torch does not share; miniatures have one of
    their own."""
    parts = ("sparton-benchmark", study, *(["miniature"] if miniature else []), code_digest())
    return Path(tempfile.gettempdir()) / "-".join(parts)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """No other run has this folder meanwhile; ends the program if one has."""
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        sys.exit(f"benchmark.py: another run leaves its files in {folder}: name another --folder")
    try:
        yield
    finally:
        lock.release()


def run_suite(
    study: Study[C],
    cells: Sequence[C],
    settings: Settings,
    context: Record,
    path: Path,
    deadline: float,
    console: Console,
) -> None:
    """Measure what a file lacks of a suite, and append to it cell by cell.

    Args:
        context: what every record of the suite says of the machine, the code and the settings.
        deadline: when no other cell is begun, of time.monotonic.
    """
    suite = context["suite"]
    earlier = [(cell_of(study, r), r) for r in records_of_run(study, suite, path)]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    context = context | {"run": earlier[0][1]["run"] if earlier else now}
    missing = [cell for cell in cells if cell not in dict(earlier)]
    counts = f"{len(cells)} cells, {len(missing)} to measure for {path}"
    console.print(f"{suite}: {counts}", highlight=False, soft_wrap=True)
    left = len(missing)
    for cell, found in run_cells(study, missing, settings, deadline):
        left -= 1
        for record in found:
            if record["status"] == "ok":
                reason = study.objection(cell, record, earlier)
                refused = {"status": "red_gate", "error": reason}
                record |= refused if reason else study.beside(cell, record, earlier)
            console.print(describe(cell.label, study.words, record), highlight=False, markup=False)
        records = [{**context, **cell._asdict(), **record} for record in found]
        append_records(path, records)
        earlier += [(cell, record) for record in records]
    if left:
        console.print(f"stopped; {left} cells left for the same command", style="yellow")
    rows = [(cell.label, record) for cell, record in earlier if cell in cells]
    console.print(result_table(suite, study.columns, rows))
