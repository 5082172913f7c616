"""Learning rates as pure functions of the step, so a resumed run cannot forget where it was."""

import math
from dataclasses import dataclass

from sparton.arguments import ArgumentError


@dataclass(frozen=True)
class ConstantSchedule:
    """Linear warm-up over ``warmup`` (a share of all steps), then the full rate."""

    warmup: float = 0.0

    def __post_init__(self) -> None:
        _check_share("warmup", self.warmup)

    def __call__(self, step: int, steps: int) -> float:
        """Factor on the base learning rate for the update of ``step`` (from 0) out of ``steps``."""
        return _warm(step, steps, self.warmup)


@dataclass(frozen=True)
class LinearSchedule:
    """Linear warm-up, then linear decay to ``final`` times the base rate, which the step after the
    last would have."""

    warmup: float = 0.06
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_share("warmup", self.warmup)
        if not 0 <= self.final <= 1:
            value = self.final
            raise ArgumentError("{final} must be a share of the base rate in [0, 1]", final=value)

    def __call__(self, step: int, steps: int) -> float:
        decay = self._decay(_progress(step, steps, self.warmup))
        return _warm(step, steps, self.warmup) * (self.final + (1 - self.final) * decay)

    def _decay(self, progress: float) -> float:
        """From 1 at the end of the warm-up to 0 behind the last step."""
        return 1 - progress


class CosineSchedule(LinearSchedule):
    """Linear warm-up, then half a cosine down to ``final`` times the base rate, which the step
    after the last would have."""

    def _decay(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


def _check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ArgumentError(f"{{{name}}} must be a share of the steps in [0, 1)", **{name: value})


def _warm(step: int, steps: int, warmup: float) -> float:
    return min(1.0, (step + 1) / max(warmup * steps, 1))


def _progress(step: int, steps: int, warmup: float) -> float:
    """0 until the warm-up is over, then linearly towards 1, behind the last step."""
    start = warmup * steps
    return min(1.0, max(0.0, (step - start) / max(steps - start, 1)))
