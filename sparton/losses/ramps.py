"""How a regularizer's weight grows: pure functions of the step, so a resumed run cannot forget."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConstantRamp:
    """The full weight from the first step."""

    def __call__(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class LinearRamp:
    """``min(1, step / steps)``."""

    steps: int

    def __post_init__(self) -> None:
        _check_steps(self.steps)

    def __call__(self, step: int) -> float:
        return min(1.0, step / self.steps)


@dataclass(frozen=True)
class QuadraticRamp:
    """``min(1, step / steps) ** 2``, the schedule of SPLADE (arXiv 2107.05720, section 3.2)."""

    steps: int

    def __post_init__(self) -> None:
        _check_steps(self.steps)

    def __call__(self, step: int) -> float:
        return min(1.0, step / self.steps) ** 2


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"a ramp needs steps of at least 1, got {steps}")
