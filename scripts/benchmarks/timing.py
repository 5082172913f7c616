"""Time and memory of one call, repeated.

A large GPU at its power limit clocks down: a launch that follows an idle gap runs at a higher clock
than launches back to back. Training is back to back, so that is what is measured: calls without a
gap, after a warm-up of the same kind. Clock, power and temperature in the middle of the measurement
are recorded.

While calls on a GPU are timed, the process is held to one core: Python's thread and autograd's take
turns, and how long one takes to wake the other on another core varies, on a virtual machine above
all, by more than small kernels take. It is the core on which these calls were fastest just before:
those of a virtual machine are not alike, and how fast one computes does not tell how fast it
launches. Who else computes on them changes within a second, so the core is chosen anew for each of
many short parts of the time. Longer calls wait for the device on any core: their time has no parts,
between which the device would rest.
"""

import gc
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

WARM_UP_SECONDS = 0.3
TRIAL_SECONDS = 2e-3
PARTS = 16
FEWEST_REPEATS = 5
PROFILED_CALLS = 5
THREADS = Path("/proc/self/task")
CONDITIONS = {
    "sm_mhz": "clocks.sm",
    "power_w": "power.draw",
    "power_limit_w": "enforced.power.limit",
    "temperature_c": "temperature.gpu",
}
_QUERY = f"nvidia-smi --query-gpu={','.join(CONDITIONS.values())} --format=csv,noheader,nounits"


def measure(
    run: Callable[[], Any], device: str, seconds: float, *, one_core: bool = True
) -> dict[str, Any]:
    """Milliseconds per call, and peak memory on a GPU.

    Args:
        one_core: hold the process to a core; not for what computes in several threads of the host.

    Returns:
        p20_ms, p50_ms, p80_ms, repeats; on a GPU also peak_bytes beyond what was allocated before,
        total_peak_bytes, and the card's :data:`CONDITIONS` where nvidia-smi tells them.
    """
    if device == "cpu":
        return _described(_cpu_times(run, seconds))
    run()
    memory = _peak(run)
    once = _gpu_times(run, 1)[0] / 1e3
    warm_up = math.ceil(WARM_UP_SECONDS / once)
    repeats = max(math.ceil(seconds / once), FEWEST_REPEATS)
    watch = ask_conditions(WARM_UP_SECONDS + seconds / 4, device_id())
    _gpu_times(run, warm_up)
    times: list[float] = []
    parts = PARTS if once <= TRIAL_SECONDS else 1
    for _ in range(parts):
        with _one_core(_fastest_core(run, once) if one_core else None):
            times += _gpu_times(run, math.ceil(repeats / parts))
    return {**_described(times), **memory, **read_conditions(watch)}


def _peak(run: Callable[[], Any]) -> dict[str, int]:
    gc.collect()  # a compiled graph leaves cycles that hold tensors of the call before
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {"peak_bytes": peak - before, "total_peak_bytes": peak}


def _fastest_core(run: Callable[[], Any], once: float) -> int | None:
    """Of those that this process may use; None where the system does not say which. Calls of
    ``once`` seconds that are longer than a trial wait for the device, on any core."""
    if not (hasattr(os, "sched_setaffinity") and THREADS.is_dir()):
        return None
    cores = os.sched_getaffinity(0)
    if once > TRIAL_SECONDS:
        return max(cores)
    calls = math.ceil(TRIAL_SECONDS / once)
    return min(cores, key=lambda core: _trial(run, core, calls))


def _trial(run: Callable[[], Any], core: int, calls: int) -> float:
    """Milliseconds of a call on this core."""
    with _one_core(core):
        return statistics.median(_gpu_times(run, calls))


@contextmanager
def _one_core(core: int | None) -> Iterator[None]:
    """Hold all threads that this process has now to a core; None leaves them where they are."""
    if core is None:
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        _move_threads({core})
        yield
    finally:
        _move_threads(cores)


def _move_threads(cores: set[int]) -> None:
    for thread in THREADS.iterdir():
        with suppress(OSError):  # one may have ended since, or may not be moved
            os.sched_setaffinity(int(thread.name), cores)


def _gpu_times(run: Callable[[], Any], repeats: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def _cpu_times(run: Callable[[], Any], seconds: float) -> list[float]:
    run()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < FEWEST_REPEATS or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _described(times: Sequence[float]) -> dict[str, Any]:
    return {**quantiles(times, "p{}_ms"), "repeats": len(times)}


def quantiles(values: Sequence[float], names: str) -> dict[str, float]:
    """Of 20, 50 and 80 %, by names in which that stands for ``{}``."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {names.format(q): round(ordered[round(q / 100 * last)], 5) for q in (20, 50, 80)}


def device_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of the device's kernels and copies per call, without the gaps between them."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_CALLS):
            call()
        torch.cuda.synchronize()
    total = sum(event.self_device_time_total for event in profiler.key_averages())
    return round(total / PROFILED_CALLS / 1e3, 5)


def device_id() -> str:
    """nvidia-smi's name of the device in use: its own order of the devices may be another."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"GPU-{properties.uuid}"


def ask_conditions(delay: float, device: str) -> subprocess.Popen:
    """nvidia-smi, asking about a device that it calls so after ``delay`` seconds."""
    return subprocess.Popen(
        ("sh", "-c", f"sleep {delay}; exec {_QUERY} --id={device}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def read_conditions(asked: subprocess.Popen) -> dict[str, float]:
    """What nvidia-smi answered; nothing where there is none, or where it does not know."""
    try:
        values = map(float, asked.communicate()[0].split(","))
        return dict(zip(CONDITIONS, values, strict=True))
    except ValueError:
        return {}
