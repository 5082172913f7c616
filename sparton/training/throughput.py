"""Time, memory and arithmetic of the training steps between two log lines."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sparton.types import TrainBatch

# Dense bf16 matrix rates in FLOP/s from the vendors' data sheets, by a part of the device name.
_PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def peak_flops(device: torch.device) -> float | None:
    """The device's data sheet rate for dense bf16 products in FLOP/s; None if not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in _PEAK_FLOPS.items() if part in name), None)


@dataclass
class ThroughputMeter:
    """Counts what passes between two calls of :meth:`read`, which the logging step makes.

    Only there is the device waited for, so the steps between are not slowed down.

    Attributes:
        device: whose memory is reported.
        flops_per_token: of the model's forward and backward, given the mean sequence length.
        world_size: examples and tokens are counted on one rank and reported for all.
    """

    device: torch.device
    flops_per_token: Callable[[float], float]
    world_size: int = 1
    _examples: int = 0
    _sequences: int = 0
    _tokens: int = 0
    _steps: int = 0
    _waited: float = 0.0
    _since: float = field(default_factory=time.perf_counter)

    def count(self, batch: TrainBatch, waited: float) -> None:
        """One step: this rank's batch, and the seconds the loop waited for it."""
        self._examples += batch.queries.num_sequences
        self._sequences += batch.queries.num_sequences + batch.documents.num_sequences
        self._tokens += batch.queries.num_tokens + batch.documents.num_tokens
        self._steps += 1
        self._waited += waited

    def read(self) -> dict[str, float]:
        """Rates since the last call, then start anew. Memory in MiB, peaks since the last call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - self._since
        record = {
            "examples_per_second": self._examples * self.world_size / seconds,
            "tokens_per_second": self._tokens * self.world_size / seconds,
            "step_ms": 1e3 * seconds / max(self._steps, 1),
            "data_wait_ms": 1e3 * self._waited / max(self._steps, 1),
        }
        peak = peak_flops(self.device)
        if peak:
            per_token = self.flops_per_token(self._tokens / max(self._sequences, 1))
            record["mfu"] = self._tokens * per_token / seconds / peak
        if self.device.type == "cuda":
            record["memory_allocated_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
            record["memory_reserved_mib"] = torch.cuda.max_memory_reserved(self.device) / 2**20
        self.restart()
        return record

    def restart(self) -> None:
        """Forget what was counted; called after work that is no training step."""
        self._examples = self._sequences = self._tokens = self._steps = 0
        self._waited, self._since = 0.0, time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
