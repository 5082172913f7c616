"""Time and memory of attention over packed sequences, ours and PyTorch's, after their results were
checked.

    python scripts/benchmark_attention.py                      # results/<gpu>/attention.jsonl
    python scripts/benchmark_attention.py --shapes documents --tune --output tuning.jsonl
    TRITON_INTERPRET=1 python scripts/benchmark_attention.py --device cpu --miniature --output a

Shapes are data, in attention_benchmark/problems.py. PyTorch's are FlashAttention on the packed
tokens (torch.nn.attention.varlen) and scaled_dot_product_attention on padded ones, each of its
backends. Outputs and gradients that differ from fp32 truth get the status red_gate and no time;
oom and failed are results too (FlashAttention takes no mask, so it refuses padding). p50_ms is the
median of calls back to back from eager Python, device_ms the time of the device's kernels alone.
--tune measures tilings of our kernels instead; winners are copied by hand into forward_tiling and
backward_tiling.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from attention_benchmark.problems import (
    BOTH,
    FORWARD,
    SHAPES,
    Problem,
    errors,
    make_problem,
    passes,
    truth,
)
from attention_benchmark.providers import PROVIDERS, attempt
from attention_benchmark.tuning import Record, first_line, tune
from head_benchmark.cells import is_out_of_memory
from head_benchmark.environment import folder_of, record_environment
from head_benchmark.runner import append_record, read_records, write_records
from head_benchmark.timing import device_ms, measure

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=None if os.isatty(1) else 160)
    torch.backends.cuda.matmul.allow_tf32 = False
    context = environment(arguments)
    path = arguments.output or ROOT / "results" / folder_of(context["gpu"]) / "attention.jsonl"
    # A shape that is measured again replaces its records; other shapes stay.
    cells = {(name, bool(arguments.tune)) for name in arguments.shapes}
    old = [r for r in read_records(path) if (r["shape"], "tiling" in r) not in cells]
    write_records(path, old)
    records = []
    for name in arguments.shapes:
        for record in shape_records(name, arguments):
            records.append({**context, "shape": name, **record})
            append_record(path, records[-1])
            console.print(describe(records[-1]), highlight=False, markup=False)
    console.print(result_table(records))
    print(f"wrote {len(records)} records to {path}")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--tune", action="store_true", help="tilings of our kernels instead")
    parser.add_argument("--output", type=Path, help="JSONL file")
    parser.add_argument("--seconds", type=float, default=0.3, help="timing of a cell")
    parser.add_argument("--terabytes", type=float, default=4.3, help="per second; an H200's copy")
    parser.add_argument(
        "--tflop", type=float, default=790.0, help="per second, in 16 bits; its GEMM"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--miniature", action="store_true", help="tiny shapes, to try the program")
    arguments = parser.parse_args(words)
    if (arguments.miniature or arguments.tune) and not arguments.output:
        parser.error("a miniature and tuning do not belong in results/: name a file with --output")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --miniature tries the program without one")
    if arguments.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("on a CPU the kernels need TRITON_INTERPRET=1 in the environment")
    return arguments


def environment(arguments: argparse.Namespace) -> Record:
    """What every record says of the machine and the code."""
    return {
        **record_environment(on_gpu=arguments.device == "cuda"),
        "run": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": 0,
        "miniature": arguments.miniature,
        "ceilings": {"terabytes_per_s": arguments.terabytes, "tflop_per_s": arguments.tflop},
        "seconds": arguments.seconds,
    }


def shape_records(name: str, arguments: argparse.Namespace) -> Iterator[Record]:
    """Records of every provider or, tuning, of every tiling."""
    shape = SHAPES[name].shrunk() if arguments.miniature else SHAPES[name]
    problem = make_problem(shape, arguments.device)
    expected = truth(problem)
    sizes = {"tokens": problem.grad.shape[0], "longest": problem.longest, **shape._asdict()}
    if arguments.tune:
        tried = tune(problem, expected, arguments.device, arguments.seconds, arguments.miniature)
        for part, tiling, record in tried:
            yield {**sizes, "mode": part, "provider": "sparton", "tiling": str(tiling), **record}
        return
    for mode in (FORWARD, BOTH):
        for provider in arguments.providers:
            record = measure_one(provider, problem, expected, mode, arguments)
            yield {**sizes, "mode": mode, "provider": provider, **record}


def measure_one(
    provider: str,
    problem: Problem,
    expected: list[Tensor],
    mode: str,
    arguments: argparse.Namespace,
) -> Record:
    """The record of one provider, its results judged before its time is taken."""
    try:
        tried = attempt(provider, problem)
        found = errors(tried.results(mode), expected)
        if not passes(found):
            return {"status": "red_gate", "errors": found}
        call = partial(tried.run, mode)
        times = measure(call, arguments.device, arguments.seconds)
        if arguments.device == "cuda":
            times["device_ms"] = device_ms(call)
    except Exception as error:  # a backend that refuses a shape is a result, too
        if is_out_of_memory(error):
            return {"status": "oom"}
        return {"status": "failed", "error": first_line(error)}
    size, flop = problem.least_work(mode)
    floors = {
        "memory_floor_ms": size / arguments.terabytes / 1e9,
        "flop_floor_ms": flop / arguments.tflop / 1e9,
    }
    return {"errors": found, **times, "bytes": size, "flop": flop, **floors, "status": "ok"}


def describe(record: Record) -> str:
    name = record.get("tiling", record["provider"])
    found = f"{record['p50_ms']:.4f} ms" if "p50_ms" in record else record["status"]
    if record["status"] == "red_gate":
        found += f" {record['errors']}"
    return f"{record['shape']} {record['mode']} {name}: {found} {record.get('error', '')}"


def result_table(records: list[Record]) -> Table:
    """Fastest first within a shape and mode."""
    columns = ("shape", "mode", "provider", "p50 ms", "device ms", "floor ms", "MiB", "status")
    table = Table(*columns, title="Attention")
    places = {(r["shape"], r["mode"]): place for place, r in reversed([*enumerate(records)])}

    def order(record: Record) -> tuple[int, float]:
        return places[record["shape"], record["mode"]], record.get("p50_ms", float("inf"))

    for r in sorted(records, key=order):
        floor = max(r.get("memory_floor_ms", 0.0), r.get("flop_floor_ms", 0.0))
        figures = (r.get("p50_ms"), r.get("device_ms"), floor or None)
        shown = ("-" if figure is None else f"{figure:.4f}" for figure in figures)
        peak = f"{r['peak_bytes'] / 2**20:,.1f}" if "peak_bytes" in r else "-"
        name = r.get("tiling", r["provider"])
        table.add_row(r["shape"], r["mode"], name, *shown, peak, r["status"])
    return table


if __name__ == "__main__":
    main()
