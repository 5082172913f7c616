"""Training of the halves of a joint model together. Shapes as in :mod:`sparton.losses.ranking`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from sparton.arguments import ArgumentError, Instance
from sparton.losses.contract import Scored, Term
from sparton.losses.ranking import (
    RankingLoss,
    added,
    by_rows,
    checked_of_queries,
    checked_ranking,
)

SUM = "sum"  # of the scores of all halves, beside the names of the halves


@dataclass(frozen=True)
class Joint:
    """A ranking loss for the scores of each half and perhaps for their weighted sum, and lessons of
    that sum to the halves; a :class:`~sparton.losses.contract.Loss`.

    The sum is :attr:`Scored.total_scores <sparton.losses.contract.Scored.total_scores>`, whose
    weights are the encoder's. A lesson is the Kullback-Leibler divergence of the pupil's
    distribution over all documents of the global batch from that of the sum, which gets no gradient
    of it: self-knowledge distillation as in BGE-M3 (Chen et al., arXiv 2402.03216, section 3.3).

    Attributes:
        sparse, tokens: the losses of the scores of the sparse half and of MaxSim.
        dense: that of the dense half; None for a model without.
        sum: that of the weighted sum; None for none.
        weights: of these losses, by the same names; 1 unless it is said. A loss of weight 0 is
            computed and logged all the same.
        lessons: weight of what a half learns from the sum, by the pupil's name; 0 unless
            it is said.
        temperatures: what the scores of each half, and of ``sum``, are divided by before the
            softmax of a lesson; 1 unless it is said.
    """

    sparse: RankingLoss
    tokens: RankingLoss
    dense: RankingLoss | None = None
    sum: RankingLoss | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    lessons: Mapping[str, float] = field(default_factory=dict)
    temperatures: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for loss in self._losses().values():
            checked_ranking(loss)
        known = {
            "weights": {*self._losses()},
            "lessons": self.halves,
            "temperatures": {*self.halves, SUM},
        }
        for setting, names in known.items():
            given = getattr(self, setting)
            if not isinstance(given, Mapping):
                raise ValueError(
                    f"{setting}={given}: must be a mapping from some of {', '.join(sorted(names))} "
                    "to numbers; the temperature of a half's own loss is a setting of that loss"
                )
            for name, value in given.items():
                if name not in names:
                    raise ValueError(
                        f"{setting}.{name}: this loss has {', '.join(sorted(names))} alone"
                    )
                low = value > 0 if setting == "temperatures" else value >= 0
                if not (low and math.isfinite(value)):
                    wanted = "positive" if setting == "temperatures" else "not negative"
                    raise ValueError(f"{setting}.{name} must be finite and {wanted}, got {value}")
        weights = (self.weights.get(name, 1.0) for name in self._losses())
        if not any((*weights, *self.lessons.values())):
            raise ValueError(
                f"all weights of {', '.join(sorted(self._losses()))} are 0, and nothing would be "
                "learned: give one of these losses a weight"
            )

    @property
    def halves(self) -> frozenset[str]:
        """The halves with a loss."""
        return frozenset(self._losses()) - {SUM}

    @property
    def needs_negatives(self) -> bool:
        return any(loss.needs_negatives for loss in self._losses().values())

    @property
    def needs_teacher(self) -> bool:
        return any(loss.needs_teacher for loss in self._losses().values())

    def terms(self, batch: Scored) -> dict[str, Term]:
        """The losses of all halves and of their sum, and ``<pupil>_lesson`` for lessons with a
        weight.

        Raises:
            ValueError: the scores of a half are missing.
        """
        if missing := self.halves - set(batch.scores):
            raise ArgumentError(
                "a Joint loss compares several halves, but the encoder has no {}: give it {head} "
                "with such a half, or take another loss",
                min(missing),
                head=Instance("JointHead"),
            )
        scores = self._scores(batch)
        terms = {
            name: Term(
                loss(scores[name], batch.positives, batch.teacher_scores),
                self.weights.get(name, 1.0),
            )
            for name, loss in self._losses().items()
        }
        for pupil, weight in self._lessons():
            lesson = self._divergence(pupil, scores[pupil], scores[SUM], "batchmean")
            terms[f"{pupil}_lesson"] = Term(lesson, weight)
        return terms

    def by_query(self, batch: Scored) -> Tensor | None:
        """The weighted sums of losses and lessons, ``[Q]``; None where a loss of these cannot tell
        queries apart."""
        scores = self._scores(batch)
        parts: list[Tensor | None] = []
        for name, loss in self._losses().items():
            part = checked_of_queries(loss, scores[name], batch.positives, batch.teacher_scores)
            parts.append(part if part is None else self.weights.get(name, 1.0) * part)
        for pupil, weight in self._lessons():
            lesson = partial(self._divergence, pupil, reduction="none")
            parts.append(weight * by_rows(lesson, scores[pupil], scores[SUM]))
        return added(parts)

    def _losses(self) -> dict[str, RankingLoss]:
        """Those that there are, by the names of their scores."""
        every = {"sparse": self.sparse, "tokens": self.tokens, "dense": self.dense, SUM: self.sum}
        return {name: loss for name, loss in every.items() if loss is not None}

    def _scores(self, batch: Scored) -> Mapping[str, Tensor]:
        """The scores of all halves, and their sum where something looks at it."""
        if self.sum is None and not any(self.lessons.values()):
            return batch.scores
        return {**batch.scores, SUM: batch.total_scores}

    def _lessons(self) -> Iterator[tuple[str, float]]:
        """Pupil and weight, where that is not 0."""
        return ((pupil, weight) for pupil, weight in self.lessons.items() if weight)

    def _divergence(
        self, pupil: str, scores: Tensor, teacher_scores: Tensor, reduction: str
    ) -> Tensor:
        """The scalar of ``batchmean``, or with ``none`` the sum of each query, ``[Q]``."""
        temperatures = (self.temperatures.get(name, 1.0) for name in (pupil, SUM))
        learned, taught = (
            F.log_softmax(each / temperature, dim=1)
            for each, temperature in zip((scores, teacher_scores), temperatures, strict=True)
        )
        divergence = F.kl_div(learned, taught.detach(), reduction=reduction, log_target=True)
        return divergence.sum(1) if reduction == "none" else divergence
