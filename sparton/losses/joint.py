"""Training of a sparse and a late-interaction half together. Shapes as in
:mod:`sparton.losses.ranking`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from sparton.arguments import ArgumentError, Instance
from sparton.losses.contract import Scored, Term
from sparton.losses.ranking import RankingLoss, added, by_rows

KINDS = ("sparse", "tokens")


@dataclass(frozen=True)
class Joint:
    """A ranking loss for the scores of each half, and lessons of each half to the other; a
    :class:`~sparton.losses.contract.Loss`.

    A lesson is the Kullback-Leibler divergence of the pupil's distribution over all documents of
    the global batch from its teacher's, which gets no gradient of it.

    Attributes:
        sparse, tokens: the losses of the scores of the sparse half and of MaxSim.
        weights: the weights of these two losses, by the same names.
        lessons: weight of what a half learns from the other, by the pupil's name; 0 or absent for
            nothing.
        temperatures: what the scores of each half are divided by before the softmax of a lesson.
    """

    halves: ClassVar[frozenset[str]] = frozenset(KINDS)

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

    def terms(self, batch: Scored) -> dict[str, Term]:
        """The losses of both halves, and ``<pupil>_lesson`` for lessons with a weight.

        Raises:
            ValueError: the scores of a half are missing.
        """
        if missing := self.halves - set(batch.scores):
            raise ArgumentError(
                "a Joint loss compares two halves, but the encoder has no {}: give it {head}, or "
                "take another loss",
                min(missing),
                head=Instance("JointHead"),
            )
        terms = {
            name: Term(
                loss(batch.scores[name], batch.positives, batch.teacher_scores), self.weights[name]
            )
            for name, loss in (("sparse", self.sparse), ("tokens", self.tokens))
        }
        for pupil, teacher, weight in self._lessons():
            lesson = self._divergence(
                pupil, teacher, batch.scores[pupil], batch.scores[teacher], "batchmean"
            )
            terms[f"{pupil}_lesson"] = Term(lesson, weight)
        return terms

    def by_query(self, batch: Scored) -> Tensor | None:
        """The weighted sums of losses and lessons, ``[Q]``; None where a loss of these cannot tell
        queries apart."""
        parts: list[Tensor | None] = []
        for name, loss in (("sparse", self.sparse), ("tokens", self.tokens)):
            part = loss.of_queries(batch.scores[name], batch.positives, batch.teacher_scores)
            parts.append(part if part is None else self.weights[name] * part)
        for pupil, teacher, weight in self._lessons():
            lesson = partial(self._divergence, pupil, teacher, reduction="none")
            scores = batch.scores[pupil], batch.scores[teacher]
            parts.append(weight * by_rows(lesson, *scores))
        return added(parts)

    def _lessons(self) -> Iterator[tuple[str, str, float]]:
        """Pupil, teacher and weight."""
        for pupil, teacher in (KINDS, KINDS[::-1]):
            if weight := self.lessons.get(pupil):
                yield pupil, teacher, weight

    def _divergence(
        self, pupil: str, teacher: str, scores: Tensor, teacher_scores: Tensor, reduction: str
    ) -> Tensor:
        """The scalar of ``batchmean``, or with ``none`` the sum of each query, ``[Q]``."""
        divergence = F.kl_div(
            F.log_softmax(scores / self.temperatures[pupil], dim=1),
            F.log_softmax(teacher_scores / self.temperatures[teacher], dim=1).detach(),
            reduction=reduction,
            log_target=True,
        )
        return divergence.sum(1) if reduction == "none" else divergence
