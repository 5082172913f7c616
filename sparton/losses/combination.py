"""Weighted sums of ranking losses. Shapes as in :mod:`sparton.losses.ranking`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sparton.losses.contract import Scored, Term, total
from sparton.losses.ranking import RankingLoss, added, checked_of_queries, checked_ranking


@dataclass(frozen=True)
class WeightedSum(RankingLoss):
    """``sum_name weights[name] * losses[name]``; itself a ranking loss.

    Attributes:
        losses: ranking losses by name, for the log.
        weights: one for each name. A loss of weight 0 is computed and logged all the same.
    """

    losses: Mapping[str, RankingLoss]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.losses:
            raise ValueError("a weighted sum of losses needs at least one loss")
        for loss in self.losses.values():
            checked_ranking(loss)
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
        if not any(self.weights.values()):
            raise ValueError(
                f"all weights of {sorted(self.losses)} are 0, and nothing would be learned: give "
                "one of these losses a weight"
            )

    @property
    def needs_negatives(self) -> bool:  # type: ignore[override]
        return any(loss.needs_negatives for loss in self.losses.values())

    @property
    def needs_teacher(self) -> bool:  # type: ignore[override]
        return any(loss.needs_teacher for loss in self.losses.values())

    def __call__(self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None) -> Tensor:
        """The arguments are those of :class:`~sparton.losses.ranking.RankingLoss`. The result is an
        fp32 scalar."""
        return total(self._of(scores, positives, teacher_scores))

    def terms(self, batch: Scored) -> dict[str, Term]:
        """The losses by name. Where representations have two halves, there is one term for
        each half, its weighted sum."""
        if len(batch.scores) > 1:
            return super().terms(batch)
        (scores,) = batch.scores.values()
        return self._of(scores, batch.positives, batch.teacher_scores)

    def of_queries(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None
    ) -> Tensor | None:
        """The weighted sums; None where a loss of these cannot tell queries apart."""
        parts = {
            name: checked_of_queries(loss, scores, positives, teacher_scores)
            for name, loss in self.losses.items()
        }
        return added(
            [part if part is None else self.weights[name] * part for name, part in parts.items()]
        )

    def _of(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None
    ) -> dict[str, Term]:
        return {
            name: Term(loss(scores, positives, teacher_scores), self.weights[name])
            for name, loss in self.losses.items()
        }
