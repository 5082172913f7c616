"""Time and memory of MaxSim, ours and others', after their results were checked.

    python scripts/benchmark_maxsim.py                       # results/<gpu>/maxsim.jsonl
    python scripts/benchmark_maxsim.py --list                # what would be measured
    python scripts/benchmark_maxsim.py --shapes 64x64_hidden --providers sparton --output a.jsonl

Shapes are data, in maxsim_benchmark/shapes.py; providers are one line each in providers.py there.
Scores and gradients that differ from fp32 truth get the status red_gate and no time. Running out of
memory, refusing, crashing and hanging are results too: oom, failed, crashed, timeout; absent is a
package that is not installed. Started again with the same command, a killed run goes on at the
missing cells. Times are medians of launches back to back. The floor of a shape is the time of its
least traffic or least arithmetic at the card's ceilings, whichever is longer.
"""

import argparse
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from head_benchmark.environment import folder_of, record_environment
from head_benchmark.runner import append_record, outcome, read_records, write_records
from maxsim_benchmark.providers import PROVIDERS, Cell, cells
from maxsim_benchmark.runner import run_cells
from maxsim_benchmark.shapes import SHAPES
from maxsim_benchmark.worker import Record, Settings

ROOT = Path(__file__).resolve().parents[1]
# What must not change between the first and the last cell of a file.
SAME_RUN = ("git_sha", "gpu", "driver", "torch", "triton", "miniature", "ceilings")


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=None if os.isatty(1) else 160)
    wanted = cells(arguments.shapes, arguments.providers)
    if arguments.list:
        for cell in wanted:
            console.print(f"  {cell.label}", highlight=False)
        console.print(f"{len(wanted)} cells")
        return
    context = environment(arguments)
    path = arguments.output or ROOT / "results" / folder_of(context["gpu"]) / "maxsim.jsonl"
    kept = [] if arguments.fresh else same_run(path, context)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    context["run"] = kept[0]["run"] if kept else now
    write_records(path, kept)
    measured = {cell_of(record) for record in kept}
    missing = [cell for cell in wanted if cell not in measured]
    console.print(f"{len(wanted)} cells, {len(missing)} to measure for {path}", highlight=False)
    count = 0
    for count, (cell, record) in enumerate(  # noqa: B007 (read after the loop)
        run_cells(missing, settings_of(arguments), arguments.deadline), start=1
    ):
        append_record(path, {**context, **cell._asdict(), **record})
        console.print(describe(cell, record), highlight=False, markup=False)
    if count < len(missing):
        left = len(missing) - count
        console.print(f"stopped; {left} cells left for the same command", style="yellow")
    console.print(result_table([r for r in read_records(path) if cell_of(r) in wanted]))


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--providers", nargs="+", choices=list(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--output", type=Path, help="JSONL file")
    parser.add_argument("--fresh", action="store_true", help="discard the file's records first")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=0.7, help="timing of a cell")
    parser.add_argument("--terabytes", type=float, default=4.3, help="per second; an H200's copy")
    parser.add_argument(
        "--tflop", type=float, default=790.0, help="per second, in 16 bits; its GEMM"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--miniature", action="store_true", help="tiny shapes, to try the program")
    parser.add_argument("--list", action="store_true", help="show the cells, measure nothing")
    arguments = parser.parse_args(words)
    arguments.deadline = time.monotonic() + arguments.stop_after
    if arguments.miniature and not (arguments.output or arguments.list):
        parser.error("times of a miniature do not belong in results/: name a file with --output")
    if arguments.device == "cuda" and not torch.cuda.is_available() and not arguments.list:
        parser.error("no CUDA device; --device cpu --miniature tries the program without one")
    return arguments


def settings_of(arguments: argparse.Namespace) -> Settings:
    return Settings(
        device=arguments.device,
        seconds=arguments.seconds,
        miniature=arguments.miniature,
        terabytes_per_s=arguments.terabytes,
        tflop_per_s=arguments.tflop,
    )


def same_run(path: Path, context: Record) -> list[Record]:
    """The file's records, but for those of packages that may be there by now.

    Raises:
        SystemExit: they come from other code or another machine.
    """
    records = read_records(path)
    for key in SAME_RUN:
        if records and records[0][key] != context[key]:
            raise SystemExit(
                f"{path} was measured with {key} = {records[0][key]}, this is {context[key]}: "
                "name another file with --output, or measure all of it again with --fresh"
            )
    return [record for record in records if record["status"] != "absent"]


def environment(arguments: argparse.Namespace) -> Record:
    """What every record says of the machine and the code."""
    return {
        **record_environment(on_gpu=arguments.device == "cuda"),
        "seed": 0,
        "miniature": arguments.miniature,
        "ceilings": {"terabytes_per_s": arguments.terabytes, "tflop_per_s": arguments.tflop},
        "seconds": arguments.seconds,
    }


def cell_of(record: Record) -> Cell:
    return Cell(record["shape"], record["mode"], record["provider"])


def describe(cell: Cell, record: Record) -> str:
    found = record["status"]
    if "p50_ms" in record:
        found = f"{record['p50_ms']:.4f} ms, {record['share_of_floor']:.0%} of the floor"
    if "peak_bytes" in record:
        found += f", {record['peak_bytes'] / 2**20:,.1f} MiB"
    return outcome(cell.label, found, record)


def result_table(records: list[Record]) -> Table:
    columns = ("shape", "mode", "provider", "p50 ms", "floor ms", "of it", "MiB", "MHz", "status")
    table = Table(*columns, title="MaxSim")
    for r in records:
        figures = ["-"] * 3
        if "p50_ms" in r:
            floor = max(r["memory_floor_ms"], r["flop_floor_ms"])
            figures = [f"{r['p50_ms']:.4f}", f"{floor:.4f}", f"{r['share_of_floor']:.0%}"]
        peak = f"{r['peak_bytes'] / 2**20:,.1f}" if "peak_bytes" in r else "-"
        clock = f"{r.get('sm_mhz', 0):.0f}"
        table.add_row(*cell_of(r), *figures, peak, clock, r["status"])
    return table


if __name__ == "__main__":
    main()
