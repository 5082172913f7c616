"""Where the time of the fused head goes, kernel by kernel, by the counters of Nsight Compute.

    python scripts/profile_head.py                  # results/<gpu>/head_profile.jsonl
    python scripts/profile_head.py --shape mix60 --patterns random_1pct --output try.jsonl

Runs itself under ``ncu`` (which needs the right to read the GPU's counters), with the clocks left
alone, and keeps one record per launch of one forward and backward and of the bare matrix product.
Times under the profiler are of single launches on a cool card, so they are not the benchmark's;
what counts is what each kernel waits for.
"""

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from head_benchmark.environment import folder_of, record_environment
from head_benchmark.problems import Problem, random_problem
from head_benchmark.runner import write_records
from head_benchmark.suites import PATTERNS, shape_of
from sparton.kernels.splade_head import splade_head

ROOT = Path(__file__).resolve().parents[1]
Record = dict[str, Any]
# Our fields: Nsight Compute's metric, and the factor to our unit.
METRICS = {
    "microseconds": ("gpu__time_duration.sum", 1e-3),
    "tensor_pipe_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 1),
    "issue_pct": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
    "dram_pct": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "dram_mib": ("dram__bytes.sum", 2**-20),
    "l2_pct": ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed", 1),
    "sm_ghz": ("sm__cycles_elapsed.avg.per_second", 1e-9),
    "registers": ("launch__registers_per_thread", 1),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
}  # fmt: skip
STALLS = (
    "barrier", "branch_resolve", "dispatch_stall", "gmma", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected",
    "short_scoreboard", "sleeping", "wait",
)  # fmt: skip
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
WARM_UPS = 3


def main() -> None:
    arguments = parse_arguments()
    if arguments.inside:
        launches(random_problem(shape_of(arguments.shape), *arguments.patterns, "cuda"))
        return
    context = {
        "run": datetime.now(UTC).isoformat(timespec="seconds"),
        **record_environment(on_gpu=True),
        "shape": arguments.shape,
    }
    records = [
        {**context, "pattern": pattern, **record}
        for pattern in arguments.patterns
        for record in profile(arguments, pattern)
    ]
    path = arguments.output or ROOT / "results" / folder_of(context["gpu"]) / "head_profile.jsonl"
    write_records(path, records)
    print(f"{len(records)} launches in {path}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="320x512x30522")
    patterns = ["random", "random_1pct"]
    parser.add_argument("--patterns", nargs="+", choices=list(PATTERNS), default=patterns)
    parser.add_argument("--output", type=Path, help="JSONL file")
    parser.add_argument("--ncu", default="ncu", help="Nsight Compute's program")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: there are no counters to read")
    return arguments


def launches(problem: Problem) -> None:
    """What is profiled: the product, then a forward and a backward of the head."""
    hidden, weight = (x.requires_grad_() for x in (problem.hidden, problem.weight))
    bias, bounds = problem.bias.requires_grad_(), problem.tokens.cu_seqlens
    rows = padded(weight).detach()
    for number in range(WARM_UPS + 1):
        torch.cuda.synchronize()
        if number == WARM_UPS:
            torch.cuda.profiler.start()
        with torch.no_grad():
            torch.mm(hidden, rows.T)
        reps = splade_head(hidden, weight, bias, bounds)
        torch.autograd.grad(reps, (hidden, weight, bias), problem.upstream)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def padded(weight: torch.Tensor) -> torch.Tensor:
    """Vocabulary rows up to a multiple of 64, without which the library's product is slow."""
    return F.pad(weight, (0, 0, 0, -len(weight) % 64))


def profile(arguments: argparse.Namespace, pattern: str) -> Iterator[Record]:
    """One record per launch.

    Raises:
        SystemExit: ncu is missing, or refuses.
    """
    names = [name for name, _ in METRICS.values()] + [STALL.format(stall) for stall in STALLS]
    command = [
        arguments.ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
        "--profile-from-start", "off", "--metrics", ",".join(names),
        sys.executable, __file__, "--inside",
        "--shape", arguments.shape, "--patterns", pattern,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit(f"{arguments.ncu} was not found: it comes with CUDA; --ncu names its place")
    lines = done.stdout.splitlines()
    start = next((row for row, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or start is None:
        sys.exit(f"ncu failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    header, _units, *rows = csv.reader(lines[start:])
    return (launch_record(dict(zip(header, row, strict=True))) for row in rows)


def launch_record(row: dict[str, str]) -> Record:
    """Figures of a launch; ``stalls`` are warps that waited per instruction issued, most first."""
    found = {name: number(row.get(metric)) for name, (metric, _) in METRICS.items()}
    figures = {
        name: round(value * METRICS[name][1], 3)
        for name, value in found.items()
        if value is not None
    }
    waits = {stall: number(row.get(STALL.format(stall))) for stall in STALLS}
    most = sorted(((w, s) for s, w in waits.items() if w), reverse=True)[:3]
    stalls = {stall: round(wait, 2) for wait, stall in most}
    return {"kernel": row["Kernel Name"].split("(")[0], **figures, "stalls": stalls}


def number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


if __name__ == "__main__":
    main()
