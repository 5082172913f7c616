"""Speed and memory of preparing training files and of loading batches from them.

    python scripts/benchmark_data.py --examples 2000000
    python scripts/benchmark_data.py --examples 200000 26000000 --workers 1 2 --folder /scratch
    python scripts/benchmark_data.py --formats mixture negatives ids --tokenizer bert-base-uncased

Files of generated text, 35 tokens a query and 159 a document, are written in the real formats, then
prepared and read through the functions that training uses, by growing numbers of worker processes.
Nothing is done with the batches, so their rate is what training may use up at most. Records go to
results/<gpu or cpu>/data.jsonl, in place of what was measured there before.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from data_benchmark.figures import LOADING, PREPARATION, shown
from data_benchmark.files import FORMATS, MIXTURE, write_files
from data_benchmark.measuring import Record, in_fresh_process, timed
from head_benchmark.environment import folder_of, record_environment
from head_benchmark.runner import write_records

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=None if os.isatty(1) else 160)
    environment = record_environment(on_gpu=torch.cuda.is_available())
    now = datetime.now(UTC).isoformat(timespec="seconds")
    context = {**environment, "cpu": cpu_model(), "cpus": os.cpu_count(), "run": now}
    output = arguments.output or ROOT / "results" / folder_of(context["gpu"]) / "data.jsonl"
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        for form, examples in product(arguments.formats, arguments.examples):
            shared = prepare(folder / f"{form}-{examples}", form, examples)
            console.print(describe_preparation(shared), highlight=False)
            found = [
                {**context, **shared, **measure(folder / f"{form}-{examples}", workers, arguments)}
                for workers in arguments.workers
            ]
            records += found
            write_records(output, records)
            console.print(loading_table(found))
    console.print(f"written to {output}", soft_wrap=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[MIXTURE])
    parser.add_argument("--workers", nargs="+", type=int, default=default_workers())
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each number of workers")
    parser.add_argument("--tokenizer", help="folder or hub name; default: a generated one")
    parser.add_argument("--folder", type=Path, help="keeps files and tables for another run")
    parser.add_argument("--output", type=Path, help="JSONL file instead of that in results/")
    return parser.parse_args()


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def default_workers() -> list[int]:
    """Powers of two up to the cores, one of which the main process needs."""
    cores = os.cpu_count() or 1
    return [2**power for power in range(8) if 2**power < cores] or [1]


def prepare(folder: Path, form: str, examples: int) -> Record:
    """Files and tables, unless they are there; what making them took."""
    done = folder.with_suffix(".json")
    if not done.exists():
        seconds, size = timed(lambda: write_files(folder, form, examples))
        record = {"format": form, "file_bytes": size, "write_s": seconds}
        record |= in_fresh_process("measure_preparation", str(folder), form)
        done.write_text(json.dumps(record), encoding="utf-8")
    return json.loads(done.read_text(encoding="utf-8"))


def measure(folder: Path, workers: int, arguments: argparse.Namespace) -> Record:
    settings = {"workers": workers, "batch": arguments.batch, "seconds": arguments.seconds}
    form = folder.name.partition("-")[0]
    words = (str(folder), form, arguments.tokenizer, *settings.values())
    return {**settings, **in_fresh_process("measure_loading", *words)}


def describe_preparation(record: Record) -> str:
    figures = (f"{heading} {shown(record, heading)}" for heading in PREPARATION)
    return f"{record['format']}: {', '.join(figures)}"


def loading_table(records: Sequence[Record]) -> Table:
    first = records[0]
    title = (
        f"{first['format']}, {first['examples']:,} examples, batches of {first['batch']}, "
        f"{first['tokens_per_pair']:.0f} tokens a pair"
    )
    table = Table("workers", *(str(record["workers"]) for record in records), title=title)
    for heading in LOADING:
        table.add_row(heading, *(shown(record, heading) for record in records))
    return table


if __name__ == "__main__":
    main()
