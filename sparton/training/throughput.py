"""Time, memory and arithmetic of the training steps between two log lines."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sparton.types import Side, TokenBatch

# Dense bf16 matrix rates in FLOP/s from the vendors' data sheets, by a part of the device name.
_PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def peak_flops(device: torch.device) -> float | None:
    """The device's data sheet rate for dense bf16 products in FLOP/s; None if not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in _PEAK_FLOPS.items() if part in name), None)


class Batch(Protocol):
    """What passes in a step: sequences by side, of which those of the first are the examples."""

    @property
    def sides(self) -> Mapping[Side, TokenBatch]: ...


@dataclass
class ThroughputMeter:
    """Counts what passes between two calls of :meth:`read`, which the logging step makes.

    Only there is the device waited for, so the steps between are not slowed down.

    Attributes:
        device: whose memory is reported.
        flops_per_token: of the model's forward and backward, given a side's mean sequence length
            and the side.
        world_size: examples and tokens are counted on one rank and reported for all.
    """

    device: torch.device
    flops_per_token: Callable[[float, Side], float]
    world_size: int = 1
    _examples: int = 0
    _sequences: Counter[Side] = field(default_factory=Counter)
    _tokens: Counter[Side] = field(default_factory=Counter)
    _steps: int = 0
    _waited: float = 0.0
    _paused: float = 0.0
    _since: float = field(default_factory=time.perf_counter)

    def count(self, batch: Batch, waited: float) -> None:
        """One step: this rank's batch, and the seconds the loop waited for it."""
        self._examples += next(iter(batch.sides.values())).num_sequences
        for side, tokens in batch.sides.items():
            self._sequences[side] += tokens.num_sequences
            self._tokens[side] += tokens.num_tokens
        self._steps += 1
        self._waited += waited

    def read(self) -> dict[str, float]:
        """Rates since the last call, then start anew. Memory in MiB, peaks since the last call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = self.clock() - self._since
        record = {
            "examples_per_second": self._examples * self.world_size / seconds,
            "tokens_per_second": self._tokens.total() * self.world_size / seconds,
            "step_ms": 1e3 * seconds / max(self._steps, 1),
            "data_wait_ms": 1e3 * self._waited / max(self._steps, 1),
        }
        peak = peak_flops(self.device)
        if peak:
            record["mfu"] = self._model_flops() / seconds / peak
        if self.device.type == "cuda":
            record["memory_allocated_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
            record["memory_reserved_mib"] = torch.cuda.max_memory_reserved(self.device) / 2**20
        self.restart()
        return record

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done within is no training step: its time does not count."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        yield
        self._paused += time.perf_counter() - begin

    def clock(self) -> float:
        """Seconds since some moment, without those of pauses."""
        return time.perf_counter() - self._paused

    def restart(self) -> None:
        """Forget what was counted; called after work that is no training step."""
        self._examples = self._steps = 0
        self._sequences.clear()
        self._tokens.clear()
        self._waited, self._since = 0.0, self.clock()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _model_flops(self) -> float:
        """The model FLOPs of what this rank has processed."""
        return sum(
            tokens * self.flops_per_token(tokens / self._sequences[side], side)
            for side, tokens in self._tokens.items()
            if tokens
        )
