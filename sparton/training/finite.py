"""The first step whose loss or gradient is not finite, found without waiting for the device."""

from collections import deque
from pathlib import Path

import torch
from torch import Tensor, nn

from sparton.errors import NonFiniteLossError
from sparton.sharded import whole

# Steps after which the numbers of one are waited for: the host is never that far ahead for long.
_LATEST = 8
# Updates in a row that a loss scale, halved each time, may skip: from 2^16 to below 2^-23.
_SKIPPED = 40


class FiniteWatch:
    """Looks at the loss and the gradient norm of every step as soon as they have arrived on the
    host by themselves, and before anything is saved.

    Args:
        encoder: whose weights that learn are looked at, too, before they are saved.
        checkpoints: where the last good ones are, for the message.
        scaled: whether the loss is scaled, as for fp16: overflows of the gradient are expected
            then, and their updates skipped.
    """

    def __init__(self, encoder: nn.Module, checkpoints: Path, scaled: bool) -> None:
        self._encoder, self._checkpoints, self._scaled = encoder, checkpoints, scaled
        self._arriving: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self._skipped = 0

    def note(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Send what a step has come to, numbers on the device, on their way to the host."""
        both = torch.stack([loss.float(), norm.float()])
        self._arriving.append((step, both.to("cpu", non_blocking=True), _arrival(both)))

    def check(self, step: int, *, wait: bool, saving: bool) -> None:
        """
        Args:
            step: that was noted last.
            wait: for the numbers of all steps, not only look at those that are there.
            saving: look at the weights, too, which waits for the device.

        Raises:
            NonFiniteLossError: names the first step at which something was not finite.
        """
        while self._arriving and (wait or self._is_there()):
            self._look(*self._arriving.popleft())
        if saving:
            weights = [p.detach() for p in self._encoder.parameters() if p.requires_grad]
            if not whole(nn.utils.get_total_norm(weights)).isfinite().item():
                self._end(f"a weight was not finite after step {step}")

    def _is_there(self) -> bool:
        event = self._arriving[0][2]
        return event is None or len(self._arriving) > _LATEST or event.query()

    def _look(self, step: int, numbers: Tensor, event: "torch.cuda.Event | None") -> None:
        if event is not None:
            event.synchronize()
        loss_is_finite, norm_is_finite = numbers.isfinite().tolist()
        self._skipped = 0 if norm_is_finite else self._skipped + 1
        if not loss_is_finite:
            self._end(f"the loss was not finite at step {step}")
        if self._skipped > (_SKIPPED if self._scaled else 0):
            since = f" nor at the {_SKIPPED} before it" if self._scaled else ""
            self._end(f"the gradient was not finite at step {step}{since}")

    def _end(self, what: str) -> None:
        raise NonFiniteLossError(
            f"{what}; nothing has been saved since. Earlier checkpoints, if any, are in "
            f"{self._checkpoints}. Try a smaller learning rate, gradient clipping, bf16 in the "
            "place of fp16, or a higher temperature of the loss"
        )


def _arrival(numbers: Tensor) -> torch.cuda.Event | None:
    """What tells that copies of a tensor that were asked for have been made; None: they are."""
    if not numbers.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event
