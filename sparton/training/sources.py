"""What the ranking loss is of each source of the data. Q queries of a global batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

LOSS_OF = "loss_of_"  # in a record, before the name of a source


class SourceLosses:
    """Means over the queries of each source since they were last forgotten; the device is waited
    for only where they are read.

    Args:
        names: of the sources, by number.
        device: of the losses.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = names
        self._sums, self._counts = torch.zeros(2, len(names), device=device).unbind()

    def count(self, sources: Tensor, losses: Tensor) -> None:
        """A step's queries: int64 ``[Q]``, the number of each one's source, and fp32 ``[Q]``."""
        self._sums.index_add_(0, sources, losses)
        self._counts.index_add_(0, sources, torch.ones_like(losses))

    def forget(self) -> None:
        """Count anew."""
        self._sums.zero_()
        self._counts.zero_()

    def state(self) -> list[list[float]]:
        """What was counted, for a checkpoint."""
        return [self._sums.tolist(), self._counts.tolist()]

    def load_state(self, state: list[list[float]]) -> None:
        """Go on from what :meth:`state` gave of the same sources."""
        for own, stored in zip((self._sums, self._counts), state, strict=True):
            own.copy_(torch.tensor(stored))

    def read(self) -> dict[str, float]:
        """``loss_of_<source>`` for the sources that had queries."""
        means = (self._sums / self._counts).tolist()
        counts = self._counts.tolist()
        return {
            f"{LOSS_OF}{name}": mean
            for name, mean, count in zip(self._names, means, counts, strict=True)
            if count
        }
