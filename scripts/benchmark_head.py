"""Time and memory of the SPLADE heads, after their results were checked.

    python scripts/benchmark_head.py --suite bars heads patterns   # results/<gpu>/head.jsonl
    python scripts/benchmark_head.py --suite heads table2 --list   # what would be measured
    python scripts/benchmark_head.py --suite heads --heads tiled sparton --output try.jsonl

Suites are data, in head_benchmark/suites.py; heads are one line each in head_benchmark/heads.py.
Every cell runs in a process of its own. A head whose results differ from fp32 truth more than those
of eager PyTorch in bfloat16 gets the status red_gate and no time; running out of memory, crashing
and hanging are results too: oom, crashed, timeout. A killed run, started again with the same
command on the same machine and the same committed code, goes on at the missing cells and tries
again those that crashed or hung. Times are medians of launches back to back, at the clock that
the card's power limit allows. Figures of different files should not be divided by each other: they
may come from different cards.
"""

import argparse
import hashlib
import os
import pickle
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from head_benchmark.cells import Record, Settings
from head_benchmark.environment import folder_of, record_environment
from head_benchmark.problems import describe_capture
from head_benchmark.runner import (
    append_record,
    cell_of,
    outcome,
    read_records,
    run_cells,
    with_truths,
    write_records,
)
from head_benchmark.suites import CAPTURED, FILES, GEMMS, SUITES, TRUTH, Cell

ROOT = Path(__file__).resolve().parents[1]
# What must not change between the first and the last cell of a file.
SAME_RUN = ("git_sha", "gpu", "driver", "torch", "triton", "seconds", "miniature")
# What another attempt may change.
RETRIED = ("crashed", "timeout")
# Rough seconds of a cell, for --list.
SECONDS_PER_CELL, SECONDS_IF_COMPILED, SECONDS_IF_BACKBONE_COMPILED = 3.0, 5.0, 18.0


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=None if os.isatty(1) else 160)
    context = {} if arguments.list else environment(arguments)
    paths = {suite: output_file(suite, context, arguments) for suite in arguments.suite}
    for path in set(paths.values()) if arguments.fresh else ():
        path.unlink(missing_ok=True)
    cells = {suite: select(SUITES[suite], arguments) for suite in arguments.suite}
    for path in () if arguments.list else sorted(set(paths.values())):
        resume(path, context, {c for suite in cells if paths[suite] == path for c in cells[suite]})
    for suite, path in paths.items():
        if arguments.list:
            list_cells(suite, cells[suite], console)
        else:
            run_suite({"suite": suite, **context}, cells[suite], path, arguments, console)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), required=True)
    parser.add_argument("--heads", nargs="+", help="only these; asks for --output")
    parser.add_argument("--shapes", nargs="+", help="only these; asks for --output")
    parser.add_argument("--captured", type=Path, help="file of scripts/capture_batch.py")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--output", type=Path, help="JSONL file instead of one per suite")
    parser.add_argument("--fresh", action="store_true", help="discard the file's records first")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=0.7, help="timing of a cell")
    parser.add_argument("--cache", type=Path, help="folder of the truths; default: a temporary one")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--miniature", action="store_true", help="tiny shapes, to try the program")
    parser.add_argument("--list", action="store_true", help="show the cells, measure nothing")
    arguments = parser.parse_args(words)
    arguments.deadline = time.monotonic() + arguments.stop_after
    if (arguments.heads or arguments.shapes) and not (arguments.output or arguments.list):
        parser.error("a part of a suite is no suite: name a file with --output")
    if arguments.miniature and arguments.results == ROOT / "results" and not arguments.output:
        parser.error("times of a miniature do not belong in results/: name a file with --output")
    if arguments.device == "cuda" and not torch.cuda.is_available() and not arguments.list:
        parser.error("no CUDA device; --device cpu --miniature tries the program without one")
    if refusal := unknown_names(arguments) or unreadable_capture(arguments.captured):
        parser.error(refusal)
    return arguments


def unknown_names(arguments: argparse.Namespace) -> str | None:
    """What is wrong with --heads and --shapes: names that no asked suite has."""
    cells = [cell for suite in arguments.suite for cell in SUITES[suite]]
    for option, field in (("heads", "head"), ("shapes", "shape")):
        known = dict.fromkeys(getattr(cell, field) for cell in cells)
        unknown = [name for name in getattr(arguments, option) or () if name not in known]
        if unknown:
            suites = " or ".join(arguments.suite)
            names = f"--{option} {' '.join(unknown)}: not in {suites}"
            return f"{names}; choose from {', '.join(known)}"
    return None


def unreadable_capture(path: Path | None) -> str | None:
    """Why --captured cannot be used."""
    if path is None:
        return None
    if not path.is_file():
        return f"--captured {path}: no such file; scripts/capture_batch.py writes one"
    try:
        describe_capture(path)
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        return f"--captured {path} cannot be read: {error}"
    return None


def select(cells: Sequence[Cell], arguments: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for; captured ones where there is a file of them."""
    return [
        cell
        for cell in cells
        if (not arguments.heads or cell.head in arguments.heads)
        and (not arguments.shapes or cell.shape in arguments.shapes)
        and (arguments.captured or cell.shape != CAPTURED)
    ]


def output_file(suite: str, context: Record, arguments: argparse.Namespace) -> Path:
    folder = arguments.results / folder_of(context.get("gpu", ""))
    return arguments.output or folder / f"{FILES[suite]}.jsonl"


def run_suite(
    context: Record,
    cells: list[Cell],
    path: Path,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Measure what the file lacks of the suite, and append to it cell by cell."""
    settings = Settings(
        device=arguments.device,
        cache=str(arguments.cache or default_cache()),
        seconds=arguments.seconds,
        miniature=arguments.miniature,
        captured=arguments.captured and str(arguments.captured.resolve()),
    )
    kept = read_records(path)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    context = context | {"run": kept[0]["run"] if kept else now}
    missing = set(cells) - {cell_of(record) for record in kept}
    suite, done = context["suite"], len(cells) - len(missing)
    console.print(f"{suite}: {len(cells)} cells, {done} of them in {path}", highlight=False)
    jobs = with_truths([cell for cell in cells if cell in missing], settings)
    measure_all(jobs, settings, context, path, arguments.deadline, console)
    records = [record for record in read_records(path) if cell_of(record) in cells]
    console.print(result_table(suite, records))


def measure_all(
    jobs: list[Cell],
    settings: Settings,
    context: Record,
    path: Path,
    deadline: float,
    console: Console,
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(jobs[0].label if jobs else "", total=len(jobs))
        left = list(jobs)
        for cell, record in run_cells(jobs, settings, deadline):
            left.pop(0)
            if cell.head != TRUTH:
                append_record(path, {**context, **cell._asdict(), **record})
            console.print(describe(cell, record), highlight=False, markup=False)
            progress.update(task, advance=1, description=left[0].label if left else "")
    if left:
        console.print(f"stopped; {len(left)} jobs left for the same command", style="yellow")


def resume(path: Path, context: Record, asked: set[Cell]) -> None:
    """Rid the file of what is measured again: a torn line, and those asked for that failed.

    Raises:
        SystemExit: its records come from other code, another machine, or cannot be told from such.
    """
    records = read_records(path)
    for record in records:
        check_same_run(path, record, context)
    again = [r for r in records if r["status"] in RETRIED and cell_of(r) in asked]
    write_records(path, [record for record in records if record not in again])


def check_same_run(path: Path, record: Record, context: Record) -> None:
    remedy = "name another file with --output, or measure all of it again with --fresh"
    keys = SAME_RUN
    if record["shape"] == CAPTURED and context["captured"]:
        keys = (*SAME_RUN, "captured")
    for key in keys:
        if record[key] != context[key]:
            raise SystemExit(
                f"{path} was measured with {key} = {record[key]}, this is {context[key]}: {remedy}"
            )
    if record["dirty"] or context["dirty"]:
        whose = "its code" if record["dirty"] else "this code"
        raise SystemExit(
            f"{path} holds records, but {whose} has changes that no commit names, so that it may "
            f"be other code: {remedy}"
        )


def environment(arguments: argparse.Namespace) -> Record:
    """What every record says of the machine and the code."""
    return {
        **record_environment(on_gpu=arguments.device == "cuda"),
        "seed": 0,
        "miniature": arguments.miniature,
        "captured": arguments.captured and describe_capture(arguments.captured),
        "seconds": arguments.seconds,
    }


def default_cache() -> Path:
    """A temporary folder that other code or another torch does not share."""
    folders = (ROOT / "scripts/head_benchmark", ROOT / "sparton")
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return Path(tempfile.gettempdir()) / f"sparton-benchmark-{digest.hexdigest()[:12]}"


def describe(cell: Cell, record: Record) -> str:
    found = record["status"]
    if "p50_ms" in record:
        found = f"{record['p50_ms']:.3f} ms ({record['p20_ms']:.3f} to {record['p80_ms']:.3f})"
    if "peak_bytes" in record:
        found += f", {record['peak_bytes'] / 2**20:,.0f} MiB"
    return outcome(cell.label, found, record)


def result_table(suite: str, records: list[Record]) -> Table:
    columns = ("shape", "pattern", "backbone", "head", "mode", "p50 ms", "TFLOP/s", "MiB", "MHz")
    table = Table(*columns, "status", title=suite)
    for r in records:
        rate = ""
        if "p50_ms" in r and r["mode"] != "forward_backward" and not r["backbone"]:
            rate = f"{2 * r['T'] * r['D'] * r['V'] / r['p50_ms'] / 1e9:.0f}"
        time_ms = f"{r['p50_ms']:.3f}" if "p50_ms" in r else "-"
        peak = f"{r['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in r else "-"
        names = (r[key] for key in ("shape", "pattern", "backbone", "head", "mode"))
        table.add_row(*names, time_ms, rate, peak, f"{r.get('sm_mhz', 0):.0f}", r["status"])
    return table


def list_cells(suite: str, cells: list[Cell], console: Console) -> None:
    truths = {cell.truth() for cell in cells if cell.head not in GEMMS}
    total = SECONDS_PER_CELL * len(truths)
    for cell in cells:
        seconds = SECONDS_IF_COMPILED if cell.compiles else SECONDS_PER_CELL
        total += SECONDS_IF_BACKBONE_COMPILED if cell.backbone == "compiled" else seconds
        console.print(f"  {cell.label}", highlight=False)
    console.print(f"{suite}: {len(cells)} cells, {len(truths)} truths, about {total:.0f} s")


if __name__ == "__main__":
    main()
