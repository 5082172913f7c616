"""Weighted sums of ranking losses. Shapes as in :mod:`sparton.losses.ranking`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparton.losses.ranking import RankingLoss


@dataclass(frozen=True)
class WeightedSum:
    """``sum_name weights[name] * losses[name]``; itself a ranking loss.

    Attributes:
        losses: ranking losses by name, for the log.
        weights: one for each name.
    """

    losses: Mapping[str, RankingLoss]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.losses:
            raise ValueError("a weighted sum of losses needs at least one loss")
        if set(self.losses) != set(self.weights):
            raise ValueError(
                f"weights are given for {sorted(self.weights)} but the losses are "
                f"{sorted(self.losses)}: give each loss one weight"
            )
        for name, weight in self.weights.items():
            if not (weight >= 0 and math.isfinite(weight)):
                raise ValueError(
                    f"the weight of loss {name!r} must be finite and not negative, got {weight}"
                )

    @property
    def needs_negatives(self) -> bool:
        return any(loss.needs_negatives for loss in self.losses.values())

    @property
    def needs_teacher(self) -> bool:
        return any(loss.needs_teacher for loss in self.losses.values())

    def parts(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None
    ) -> dict[str, Tensor]:
        """The unweighted losses by name; arguments as :class:`RankingLoss`."""
        return {name: loss(scores, positives, teacher_scores) for name, loss in self.losses.items()}

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of :meth:`parts`."""
        return torch.stack([self.weights[name] * part for name, part in parts.items()]).sum()

    def __call__(self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None) -> Tensor:
        """Arguments as :class:`RankingLoss`; fp32 scalar."""
        return self.total(self.parts(scores, positives, teacher_scores))
