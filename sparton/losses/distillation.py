"""Ranking losses that follow a teacher's scores.

Q queries, N = Q * (1 + K) documents of the global batch; only a query's own 1 + K count here.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from sparton.losses.ranking import RankingLoss, own_scores

_NEAREST = 1e-3  # of scores that differ by less, a quotient would make gradients of any size


@dataclass(frozen=True)
class MarginMSE(RankingLoss):
    """Squared error of the margins between positive and negatives (arXiv 2010.02666).

    Attributes:
        scale: the teacher's margins are multiplied by it, to bring them to the student's range.
    """

    needs_negatives: ClassVar[bool] = True
    needs_teacher: ClassVar[bool] = True

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"MarginMSE scale must be positive and finite, got {self.scale}")

    def __call__(self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None) -> Tensor:
        """The arguments are those of :class:`~sparton.losses.ranking.RankingLoss`. The result is an
        fp32 scalar, the mean over queries and negatives.

        Raises:
            ValueError: no negatives, no teacher scores, or not one for each document of a query.
        """
        own, teacher = _own_scores(scores, positives, teacher_scores)
        margins = own[:, :1] - own[:, 1:]
        return F.mse_loss(margins, self.scale * (teacher[:, :1] - teacher[:, 1:]))

    def of_queries(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None
    ) -> Tensor:
        """The means over each query's negatives."""
        own, teacher = _own_scores(scores, positives, teacher_scores)
        errors = own[:, :1] - own[:, 1:] - self.scale * (teacher[:, :1] - teacher[:, 1:])
        return errors.square().mean(1)


@dataclass(frozen=True)
class KLDivergence(RankingLoss):
    """Kullback-Leibler divergence from the teacher's distribution over a query's documents, as in
    SPLADE-v3 (Lassance et al., arXiv 2403.06789).

    The student's gradient shrinks as ``1 / temperature ** 2`` where both temperatures grow; nothing
    makes up for it here. sentence-transformers multiplies by ``temperature ** 2``: to have its
    value, give this loss that weight in a :class:`sparton.losses.combination.WeightedSum`.

    Attributes:
        temperature: the student's scores are divided by it before the softmax.
        teacher_temperature: the same for the teacher's.
        min_max: bring the student's scores for the documents of a query to [0, 1] before, as PyLate
            does for teachers whose scores are between these (ColBERT-Zero). Of a positive and one
            negative it makes 0 and 1, whatever they were, so that it needs two negatives.
    """

    needs_negatives: ClassVar[bool] = True
    needs_teacher: ClassVar[bool] = True

    temperature: float = 1.0
    teacher_temperature: float = 1.0
    min_max: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "teacher_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"KLDivergence {name} must be positive and finite, got {getattr(self, name)}"
                )

    def __call__(self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None) -> Tensor:
        """Arguments and errors are those of :class:`MarginMSE`; ``min_max`` refuses one negative,
        too. The result is an fp32 scalar in nats, the mean over queries."""
        return self._divergence(scores, positives, teacher_scores, "batchmean")

    def of_queries(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None
    ) -> Tensor:
        """In nats."""
        return self._divergence(scores, positives, teacher_scores, "none").sum(1)

    def _divergence(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None, reduction: str
    ) -> Tensor:
        own, teacher = _own_scores(scores, positives, teacher_scores)
        if self.min_max:
            if own.shape[1] < 3:
                raise ValueError(
                    "KLDivergence with min_max brings the scores of a positive and one negative to "
                    "0 and 1, whatever they are, so that nothing is learned: give each query two "
                    "negatives (num_negatives), or leave min_max out"
                )
            own = _between_0_and_1(own)
        return F.kl_div(
            F.log_softmax(own / self.temperature, dim=1),
            F.log_softmax(teacher / self.teacher_temperature, dim=1),
            reduction=reduction,
            log_target=True,
        )


def _between_0_and_1(scores: Tensor) -> Tensor:
    """Rows from their smallest number to their largest; of a row of equal ones, zeros without a
    gradient, and of one whose numbers are nearly equal, _NEAREST is their largest difference."""
    low, high = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
    spread = high - low
    return (scores - low) / spread.clamp_min(_NEAREST) * (spread > 0)


def _own_scores(
    scores: Tensor, positives: Tensor, teacher_scores: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Each query's scores of its own 1 + K documents, and the teacher's; fp32 ``[Q, 1 + K]``."""
    if teacher_scores is None:
        raise ValueError(
            "this loss follows a teacher, but the data has no teacher scores: use data that has, "
            "or another loss, such as InfoNCE"
        )
    own = own_scores(scores, positives)
    if teacher_scores.shape != own.shape:
        raise ValueError(
            f"teacher_scores {list(teacher_scores.shape)} where each of {own.shape[0]} queries has "
            f"{own.shape[1]} documents of its own: give one teacher score for each of them"
        )
    return own, teacher_scores.to(own.dtype)
