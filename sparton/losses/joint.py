"""Training of a sparse and a late-interaction half together. Shapes as in
:mod:`sparton.losses.ranking`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from sparton.arguments import ArgumentError, Instance
from sparton.losses.ranking import RankingLoss

KINDS = ("sparse", "tokens")


@dataclass(frozen=True)
class Joint:
    """A ranking loss for the scores of each half, and lessons of each half to the other.

    A lesson is the Kullback-Leibler divergence of the pupil's distribution over all documents of
    the global batch from its teacher's, which gets no gradient of it.

    Attributes:
        sparse, tokens: the losses of the scores of the sparse half and of MaxSim.
        weights: of these, by the same names.
        lessons: weight of what a half learns from the other, by the pupil's name; 0 or absent for
            nothing.
        temperatures: the scores of a half are divided by its own before the softmax of a lesson.
    """

    sparse: RankingLoss
    tokens: RankingLoss
    weights: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))
    lessons: Mapping[str, float] = field(default_factory=dict)
    temperatures: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))

    def __post_init__(self) -> None:
        for setting in ("weights", "lessons", "temperatures"):
            for name, value in getattr(self, setting).items():
                if name not in KINDS:
                    raise ValueError(f"{setting}.{name}: the halves are {' and '.join(KINDS)}")
                low = value > 0 if setting == "temperatures" else value >= 0
                if not (low and math.isfinite(value)):
                    wanted = "positive" if setting == "temperatures" else "not negative"
                    raise ValueError(f"{setting}.{name} must be finite and {wanted}, got {value}")
        for setting in ("weights", "temperatures"):
            if missing := set(KINDS) - set(getattr(self, setting)):
                raise ValueError(f"{setting} lacks {', '.join(sorted(missing))}")

    @property
    def needs_negatives(self) -> bool:
        return self.sparse.needs_negatives or self.tokens.needs_negatives

    @property
    def needs_teacher(self) -> bool:
        return self.sparse.needs_teacher or self.tokens.needs_teacher

    def parts(
        self,
        scores: Mapping[str, Tensor],
        positives: Tensor,
        teacher_scores: Tensor | None,
    ) -> dict[str, Tensor]:
        """The unweighted losses of both halves, and ``<pupil>_lesson`` for lessons with a weight.

        Args:
            scores: ``sparse`` and ``tokens``, fp32 ``[Q, N]`` each.
            positives, teacher_scores: as :class:`RankingLoss`.

        Raises:
            ValueError: the scores of a half are missing.
        """
        if missing := set(KINDS) - set(scores):
            raise ArgumentError(
                "the joint loss compares two halves, but the encoder has no {}: give it {head}, or "
                "take another loss",
                missing.pop(),
                head=Instance("JointHead"),
            )
        losses = {"sparse": self.sparse, "tokens": self.tokens}
        parts = {
            name: loss(scores[name], positives, teacher_scores) for name, loss in losses.items()
        }
        for pupil, teacher in (KINDS, KINDS[::-1]):
            if self.lessons.get(pupil):
                parts[f"{pupil}_lesson"] = F.kl_div(
                    self._log_softmax(scores, pupil),
                    self._log_softmax(scores, teacher).detach(),
                    reduction="batchmean",
                    log_target=True,
                )
        return parts

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of :meth:`parts`."""
        weights = {**self.weights, **{f"{name}_lesson": w for name, w in self.lessons.items()}}
        return torch.stack([weights[name] * part for name, part in parts.items()]).sum()

    def __call__(
        self, scores: Mapping[str, Tensor], positives: Tensor, teacher_scores: Tensor | None
    ) -> Tensor:
        """Arguments as :meth:`parts`; fp32 scalar."""
        return self.total(self.parts(scores, positives, teacher_scores))

    def _log_softmax(self, scores: Mapping[str, Tensor], name: str) -> Tensor:
        return F.log_softmax(scores[name] / self.temperatures[name], dim=1)
