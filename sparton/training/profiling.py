"""What the steps of a training consist of, kernel by kernel."""

import json
import logging
import time
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from sparton.training.loggers import Logger, OpenLogger, Record
from sparton.writing import replacing

log = logging.getLogger(__name__)
FILE = "profile.json"
_BEGIN, _END = 2, 3  # lines of the log between which it looks: the first window warms up


class ProfileLogger(Logger):
    """``profile.json`` with the kernels of a window of steps, the most expensive first.

    The window lies between the second line of this run's log and the third or, where there was an
    evaluation meanwhile, which is no step, between the next two lines without. Numbers are those of
    a step: calls, and milliseconds of the device; without a GPU, operators and those of a core.

    Args:
        directory: of the file.
    """

    def __init__(self, directory: str, start_step: int = 0):
        self._path = Path(directory) / FILE
        self._lines = self._first = 0
        self._began = 0.0
        on_gpu = torch.cuda.is_available()
        self._activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        self._profile: profile | None = None

    def log(self, record: Record, step: int) -> None:
        self._lines += 1
        if self._lines == _END and any(name.startswith("dev_") for name in record):
            assert self._profile is not None
            self._profile.stop()
            self._lines = _BEGIN
        if self._lines == _BEGIN:
            self._profile = profile(activities=[self._activity])
            self._profile.start()
            self._first, self._began = step + 1, time.perf_counter()
        elif self._lines == _END:
            self._write(step)

    def close(self) -> None:
        if self._lines < _END:
            log.warning(
                "no %s: it needs %d lines of the log, and no evaluation between the last two of "
                "them: make log_every smaller",
                *(FILE, _END),
            )
        if self._profile is not None:
            self._profile.stop()

    def _write(self, step: int) -> None:
        assert self._profile is not None
        seconds, steps = time.perf_counter() - self._began, step + 1 - self._first
        self._profile.stop()
        device = "cpu" if self._activity == ProfilerActivity.CPU else "device"
        events = self._profile.key_averages()
        kernels = [
            (
                getattr(event, f"self_{device}_time_total") / 1e3 / steps,
                event.count / steps,
                event.key,
            )
            for event in events
        ]
        kernels = sorted((kernel for kernel in kernels if kernel[0]), reverse=True)
        content = {
            "first_step": self._first,
            "steps": steps,
            "step_ms": round(1e3 * seconds / steps, 3),
            "kernels": [
                {"name": name, "calls": round(calls, 3), "ms": round(ms, 4)}
                for ms, calls, name in kernels
            ],
        }
        with replacing(self._path) as fresh:
            fresh.write_text(json.dumps(content, indent=1) + "\n")
        self._profile = None


def profile_logger(directory: str) -> OpenLogger:
    """Kernels of a window of steps, in a file of the run's folder."""
    return partial(ProfileLogger, directory)
