"""Speed and memory of whole training runs: ours, as ``python train.py`` runs them, and those of
sentence-transformers' trainers on the same texts from the same model folder.

    python scripts/benchmark_training.py --suite splade colbert   # results/<gpu>/training.jsonl
    python scripts/benchmark_training.py --suite gpus --list      # what would be measured
    python scripts/benchmark_training.py --suite splade --profile # .../training_profile.jsonl

Suites are data, in training_benchmark/suites.py. Every cell is a command of its own, with real
logging, optimizer and loading from files; the figures are medians over the windows of its log after
a warm-up. Running out of memory, failing and hanging are results too: oom, failed, timeout; losses
that cannot be believed have the status red_gate. A killed run, started again with the same command
on the same machine and the same committed code, goes on at the missing cells and tries again those
that failed or hung. --profile looks into a few steps of our cells instead: how busy the GPU is,
with what, and how often the host waits for it.
"""

import argparse
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from head_benchmark.environment import folder_of, record_environment
from head_benchmark.runner import append_record, read_records, write_records
from sparton.training.manifest import installed_version
from training_benchmark.commands import SEED
from training_benchmark.figures import objection
from training_benchmark.profiling import profile_cell
from training_benchmark.runner import Record, Settings, run_cell
from training_benchmark.screen import cell_of, describe, list_cells, result_table
from training_benchmark.suites import OURS, SUITES, Cell

ROOT = Path(__file__).resolve().parents[1]
# What must not change between the first and the last cell of a file.
SAME_RUN = ("git_sha", "gpu", "driver", "torch", "triton", "seconds", "miniature")
RETRIED = ("failed", "timeout")
PACKAGES = ("transformers", "sentence-transformers", "datasets", "accelerate")


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=None if os.isatty(1) else 160)
    for suite in arguments.suite:
        cells = select(suite, arguments)
        if arguments.list:
            seconds = None if arguments.profile else arguments.seconds
            list_cells(suite, cells, seconds, console)
        else:
            run_suite(suite, cells, arguments, console)


def run_suite(
    suite: str, cells: Sequence[Cell], arguments: argparse.Namespace, console: Console
) -> None:
    """Measure what the file lacks of the suite, and append to it cell by cell."""
    context = {"suite": suite, **environment(arguments)}
    path = output_file(context, arguments)
    kept = resume(path, context, set(cells), arguments.fresh)
    write_records(path, kept)
    own = [record for record in kept if record["suite"] == suite]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    context["run"] = own[0]["run"] if own else now
    measured = {cell_of(record) for record in own}
    missing = [cell for cell in cells if cell not in measured]
    found = f"{suite}: {len(cells)} cells, {len(missing)} to measure for {path}"
    console.print(found, highlight=False)
    settings = Settings(
        arguments.folder or default_folder(arguments), arguments.seconds, arguments.miniature
    )
    measure_all(missing, settings, context, path, arguments, console)
    console.print(result_table(suite, records_of(path, suite)))


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), required=True)
    parser.add_argument("--cells", help="only those whose label has this regular expression")
    parser.add_argument("--profile", action="store_true", help="look into a few steps of ours")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--output", type=Path, help="JSONL file instead of that in --results")
    parser.add_argument("--folder", type=Path, help="of the generated model and texts")
    parser.add_argument("--fresh", action="store_true", help="discard the suite's records first")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a cell, after warm-up")
    parser.add_argument("--miniature", action="store_true", help="tiny, to try the program")
    parser.add_argument("--list", action="store_true", help="show the cells, measure nothing")
    arguments = parser.parse_args(words)
    arguments.deadline = time.monotonic() + arguments.stop_after
    if arguments.miniature and not (arguments.output or arguments.list):
        parser.error("figures of a miniature do not belong in results/: name a file with --output")
    if not (arguments.miniature or arguments.list or torch.cuda.is_available()):
        parser.error("no CUDA device; --miniature tries the program without one")
    return arguments


def select(suite: str, arguments: argparse.Namespace) -> list[Cell]:
    """The cells asked for; a profile is of ours only."""
    return [
        cell
        for cell in SUITES[suite]
        if re.search(arguments.cells or "", cell.label)
        and (cell.system == OURS or not arguments.profile)
    ]


def measure_all(
    cells: Sequence[Cell],
    settings: Settings,
    context: Record,
    path: Path,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    measure: Callable[[Cell], Record] = partial(run_cell, settings=settings)
    if arguments.profile:
        measure = partial(profile_cell, settings=settings)
    for number, cell in enumerate(cells):
        if time.monotonic() > arguments.deadline:
            left = len(cells) - number
            console.print(f"stopped; {left} cells left for the same command", style="yellow")
            return
        record = gpus_missing(cell, settings) or measure(cell)
        if record["status"] == "ok" and not arguments.profile:
            found = records_of(path, context["suite"])
            earlier = [(cell_of(other), other) for other in found]
            if reason := objection(cell, record, earlier):
                record |= {"status": "red_gate", "error": reason}
        append_record(path, {**context, **cell._asdict(), **record})
        console.print(describe(cell, record), highlight=False, markup=False)


def gpus_missing(cell: Cell, settings: Settings) -> Record | None:
    """A record of a cell that this machine has too few GPUs for."""
    if settings.miniature or cell.gpus <= torch.cuda.device_count():
        return None
    return {"status": "failed", "error": f"{torch.cuda.device_count()} GPUs are here"}


def output_file(context: Record, arguments: argparse.Namespace) -> Path:
    name = "training_profile.jsonl" if arguments.profile else "training.jsonl"
    return arguments.output or arguments.results / folder_of(context["gpu"]) / name


def records_of(path: Path, suite: str) -> list[Record]:
    return [record for record in read_records(path) if record["suite"] == suite]


def resume(path: Path, context: Record, asked: set[Cell], fresh: bool) -> list[Record]:
    """The records of the file, but for those of the suite that are measured again: all if
    ``fresh``, else those asked for that failed.

    Raises:
        SystemExit: those of the suite come from other code, another machine, or cannot be told
            from such.
    """
    records = read_records(path)
    own = records_of(path, context["suite"])
    others = [record for record in records if record not in own]
    if fresh:
        return others
    for record in own:
        check_same_run(path, record, context)
    failed = [r for r in own if r["status"] in RETRIED and cell_of(r) in asked]
    return [record for record in records if record not in failed]


def check_same_run(path: Path, record: Record, context: Record) -> None:
    remedy = "name another file with --output, or measure all of the suite again with --fresh"
    for key in SAME_RUN:
        if record[key] != context[key]:
            raise SystemExit(
                f"{path} has {context['suite']} measured with {key} = {record[key]}, this is "
                f"{context[key]}: {remedy}"
            )
    if record["dirty"] or context["dirty"]:
        raise SystemExit(
            f"{path} holds records, but code has changes that no commit names: {remedy}"
        )


def environment(arguments: argparse.Namespace) -> Record:
    """What every record says of the machine and the code."""
    return {
        **record_environment(on_gpu=torch.cuda.is_available()),
        "cpus": os.cpu_count(),
        "versions": {package: installed_version(package) for package in PACKAGES},
        "seed": SEED,
        "miniature": arguments.miniature,
        "seconds": arguments.seconds,
    }


def default_folder(arguments: argparse.Namespace) -> Path:
    """A temporary folder that another workload does not share."""
    workload = ROOT / "scripts/training_benchmark/workload.py"
    digest = hashlib.sha256(workload.read_bytes() + str(arguments.miniature).encode())
    return Path(tempfile.gettempdir()) / f"sparton-training-{digest.hexdigest()[:12]}"


if __name__ == "__main__":
    main()
