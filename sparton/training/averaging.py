"""Averages of the weights over the steps of a run, which often rank better than the last weights.

How much the weights after a step count is a pure function of the step, as a schedule is.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sparton.arguments import ArgumentError

AveragingRule = Callable[[int, int], float]


@dataclass(frozen=True)
class ExponentialAverage:
    """The exponential moving average (EMA) of the weights after every step.

    At first it forgets faster, by the decay ``(1 + n) / (10 + n)`` after n steps, as
    ``tf.train.ExponentialMovingAverage`` does, so that the weights which a run begins with do not
    stay in the averages of a short one.

    Attributes:
        decay: what the average keeps of itself in every step.

    Raises:
        ArgumentError: a decay outside of [0, 1).
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        _check_share("decay", self.decay)

    def __call__(self, completed: int, steps: int) -> float:
        """What the weights after ``completed`` (from 1) of ``steps`` count in the average that
        they enter."""
        return 1 - min(self.decay, (1 + completed) / (10 + completed))


@dataclass(frozen=True)
class StochasticWeightAverage:
    """The plain mean of the weights after every step of the last part of a run (Izmailov et al.,
    arXiv 1803.05407, who average once an epoch). Before that part the average is the weights.

    Attributes:
        start: the share of the steps after which it begins.

    Raises:
        ArgumentError: a start outside of [0, 1).
    """

    start: float = 0.75

    def __post_init__(self) -> None:
        _check_share("start", self.start)

    def __call__(self, completed: int, steps: int) -> float:
        """As :meth:`ExponentialAverage.__call__`."""
        return 1 / max(completed - int(self.start * steps), 1)


class AveragedWeights:
    """The running average of an encoder's trainable parameters, in fp32 at least.

    ``torch.optim.swa_utils.AveragedModel`` would copy the whole encoder, tokenizers and frozen
    weights included, and average in its own precision, in which a bf16 average stands still.
    Buffers are counters here, and stay the encoder's own.

    Args:
        encoder: averaged from the weights that it has now on.
        rule: how much the weights after a step count.
        steps: of the run.
    """

    def __init__(self, encoder: nn.Module, rule: AveragingRule, steps: int) -> None:
        self._rule, self._steps = rule, steps
        self._weights = {
            name: parameter.detach()
            for name, parameter in encoder.named_parameters()
            if parameter.requires_grad
        }
        self._averages = {name: _wide(weight).clone() for name, weight in self._weights.items()}

    def update(self, completed: int) -> None:
        """Let the weights after ``completed`` (from 1) steps enter the average."""
        average = get_ema_multi_avg_fn(1 - self._rule(completed, self._steps))
        average([*self._averages.values()], [*map(_wide, self._weights.values())], completed)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the encoder has the averages; afterwards its own weights again, bit for bit."""
        own = {name: weight.clone() for name, weight in self._weights.items()}
        self._set(self._averages)
        try:
            yield
        finally:
            self._set(own)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by the names of the parameters."""
        return self._averages

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the averages of :meth:`state_dict`, on any device."""
        for name, average in self._averages.items():
            average.copy_(state[name])

    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])


def _wide(weight: Tensor) -> Tensor:
    """In fp32, or as it is where that is no narrower."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ArgumentError(f"{{{name}}} must be in [0, 1)", **{name: value})
