"""Ranking losses that follow a teacher's scores.

Q queries, N = Q * (1 + K) documents of the global batch; only a query's own 1 + K count here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class MarginMSE:
    """Squared error of the margins between positive and negatives (arXiv 2010.02666).

    Attributes:
        scale: the teacher's margins are multiplied by it, to bring them to the student's range.
    """

    scale: float = 1.0

    def __call__(self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None) -> Tensor:
        """
        Args:
            scores: fp32 ``[Q, N]``.
            positives: int64 ``[Q]``, the column of each query's positive; its negatives follow it.
            teacher_scores: fp32 ``[Q, 1 + K]``, the positive's first.

        Returns:
            fp32 scalar, the mean over queries and negatives.

        Raises:
            ValueError: no teacher scores, or no negatives.
        """
        own, teacher = _own_scores(scores, positives, teacher_scores)
        margins = own[:, :1] - own[:, 1:]
        return F.mse_loss(margins, self.scale * (teacher[:, :1] - teacher[:, 1:]))


@dataclass(frozen=True)
class KLDivergence:
    """Kullback-Leibler divergence from the teacher's distribution over a query's documents.

    Attributes:
        temperature: the student's scores are divided by it before the softmax.
        teacher_temperature: the same for the teacher's.
    """

    temperature: float = 1.0
    teacher_temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "teacher_temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"KLDivergence {name} must be positive, got {getattr(self, name)}")

    def __call__(self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None) -> Tensor:
        """Arguments, errors as :class:`MarginMSE`; fp32 scalar in nats, the mean over queries."""
        own, teacher = _own_scores(scores, positives, teacher_scores)
        return F.kl_div(
            F.log_softmax(own / self.temperature, dim=1),
            F.log_softmax(teacher / self.teacher_temperature, dim=1),
            reduction="batchmean",
            log_target=True,
        )


def _own_scores(
    scores: Tensor, positives: Tensor, teacher_scores: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Each query's scores of its own 1 + K documents, and the teacher's; fp32 ``[Q, 1 + K]``."""
    if teacher_scores is None:
        raise ValueError(
            "this loss follows a teacher, but the data has no teacher scores: use "
            "data=distillation or data=distillation_ids, or loss=infonce"
        )
    count = teacher_scores.shape[1]
    if count < 2:
        raise ValueError(
            "this loss compares a positive with negatives, but num_negatives=0: set num_negatives"
        )
    columns = positives[:, None] + torch.arange(count, device=positives.device)
    return scores.gather(1, columns), teacher_scores.to(scores.dtype)
