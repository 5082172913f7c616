"""Where the time of the fused head goes, kernel by kernel, by the counters of Nsight Compute.

``ncu`` runs ``python -m benchmarks.head.profile SHAPE PATTERN``; it needs the right to read the
GPU's counters, and leaves the clocks alone. Its times are of single launches on a cool card, so
they are not the benchmark's; what counts is what each kernel waits for.
"""

import csv
import os
import subprocess
import sys

import torch
import torch.nn.functional as F

from benchmarks.head.problems import Problem, random_problem
from benchmarks.head.suites import Cell, shape_of
from benchmarks.processes import python_path
from benchmarks.screen import Record
from sparton.kernels.splade_head import splade_head

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
# What warps wait for, by the names of Nsight Compute.
STALLS = {
    "barrier": "other warps",
    "branch_resolve": "branches",
    "gmma": "the tensor cores",
    "lg_throttle": "the queue of loads",
    "long_scoreboard": "loads",
    "math_pipe_throttle": "arithmetic",
    "mio_throttle": "the queue of shared memory",
    "no_instruction": "instructions",
    "not_selected": "their turn",
    "short_scoreboard": "shared memory",
    "wait": "a fixed latency",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
WARM_UPS = 3


def launches(problem: Problem) -> None:
    """What is profiled: the product, then a forward and a backward of the head."""
    hidden, weight = (x.requires_grad_() for x in (problem.hidden, problem.weight))
    bias, bounds = problem.bias.requires_grad_(), problem.tokens.cu_seqlens
    # Without a multiple of 64 rows the library's product is slow.
    rows = F.pad(weight, (0, 0, 0, -len(weight) % 64)).detach()
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


def profile(cell: Cell) -> list[Record]:
    """One record per launch of one forward and backward, and of the bare matrix product.

    Raises:
        ImportError: there is no such program.
        RuntimeError: it refuses.
    """
    names = [name for name, _ in METRICS.values()] + [STALL.format(stall) for stall in STALLS]
    command = [
        "ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
        "--profile-from-start", "off", "--metrics", ",".join(names),
        sys.executable, "-m", "benchmarks.head.profile", cell.shape, cell.pattern,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": python_path()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    except FileNotFoundError as error:
        raise ImportError("ncu was not found: it comes with CUDA") from error
    lines = done.stdout.splitlines()
    start = next((row for row, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or start is None:
        raise RuntimeError(f"ncu failed: {done.stdout[-200:]}{done.stderr[-200:]}")
    header, _units, *rows = csv.reader(lines[start:])
    return [launch_record(dict(zip(header, row, strict=True))) for row in rows]


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
    kernel = row["Kernel Name"].split("(")[0]
    return {"kernel": kernel, **figures, "stalls": stalls, "status": "ok"}


def number(text: str | None) -> float | None:
    digits = (text or "").replace(",", "")
    return float(digits) if digits[:1].isdigit() else None


if __name__ == "__main__":
    shape, pattern = sys.argv[1:]
    launches(random_problem(shape_of(shape), pattern, "cuda"))
