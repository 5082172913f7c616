"""Ranking losses: functions of scores alone, whatever model made them.

Q queries, N documents of the global batch, grouped by query, the positive first. N = Q * (1 + K)
unless some queries have no negatives of their own, see :mod:`sparton.losses.contract`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sparton.losses.contract import Scored, Term, checked_loss, each_query

_ENTRIES = 2**24  # of a matrix of scores that is looked at for the log
_NO_TARGET = torch.iinfo(torch.int64).min


class RankingLoss(ABC):
    """A function of one matrix of scores; a :class:`~sparton.losses.contract.Loss`.

    Where representations have two halves, it is applied to the scores of each half, and the sum of
    the two is minimised.
    """

    needs_negatives: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    halves: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __call__(self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None) -> Tensor:
        """
        Args:
            scores: fp32 ``[Q, N]``.
            positives: int64 ``[Q]``, the column of each query's positive; its negatives follow it.
            teacher_scores: fp32 ``[Q, 1 + K]``, the positive's first, or None.

        Returns:
            fp32 scalar.
        """

    def terms(self, batch: Scored) -> dict[str, Term]:
        """The loss of the scores of each half, by the name of the half."""
        return {
            half: Term(self(scores, batch.positives, batch.teacher_scores))
            for half, scores in batch.scores.items()
        }

    def of_queries(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None
    ) -> Tensor | None:
        """What each query adds to the mean that the loss is, fp32 ``[Q]``, for the log of sources;
        None of a loss that is no such mean. The arguments are those of a call."""
        return None

    def by_query(self, batch: Scored) -> Tensor | None:
        """The sum of :meth:`of_queries` over the halves, ``[Q]``, or None."""
        return added(
            [
                checked_of_queries(self, scores, batch.positives, batch.teacher_scores)
                for scores in batch.scores.values()
            ]
        )


def checked_ranking(loss: object) -> RankingLoss:
    """The same, if it is a loss of one matrix of scores, as the parts of others are.

    Raises:
        ValueError: it is not, or has weights of its own.
    """
    checked_loss(loss)
    if not isinstance(loss, RankingLoss):
        raise ValueError(
            f"{type(loss).__name__} is no loss of one matrix of scores, as the parts of other "
            "losses are: take a subclass of sparton.losses.ranking.RankingLoss"
        )
    return loss


def checked_of_queries(
    loss: RankingLoss, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None
) -> Tensor | None:
    """What a loss, perhaps a user's, says of each query.

    Raises:
        ValueError: it is not one number for each.
    """
    found = loss.of_queries(scores, positives, teacher_scores)
    return None if found is None else each_query(found, type(loss).__name__, len(positives))


def added(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of tensors of one shape; None if one of them is None."""
    known = [part for part in parts if part is not None]
    return torch.stack(known).sum(0) if len(known) == len(parts) else None


def by_rows(compute: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """What ``compute`` makes of Q rows, ``[Q]``, some of them at a time, so that no matrix of the
    size of all scores is made. The first operand is ``[Q, N]``."""
    rows = max(_ENTRIES // max(operands[0].shape[1], 1), 1)
    parts = zip(*(operand.split(rows) for operand in operands), strict=True)
    return torch.cat([compute(*part) for part in parts])


@dataclass(frozen=True)
class InfoNCE(RankingLoss):
    """Cross entropy of the positive among all documents of the global batch (arXiv 1807.03748).

    Attributes:
        temperature: scores are divided by it.
        symmetric: also ask every positive for its query among all queries; the mean of both.
    """

    temperature: float = 1.0
    symmetric: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"InfoNCE temperature must be positive and finite, got {self.temperature}"
            )

    def __call__(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None = None
    ) -> Tensor:
        """The arguments are those of :class:`RankingLoss`, and ``teacher_scores`` go unused. The
        result is an fp32 scalar in nats."""
        scores = scores / self.temperature
        loss = _cross_entropy(scores, positives)
        if not self.symmetric:
            return loss
        by_positive = scores[:, positives].T
        queries = torch.arange(len(positives), device=positives.device)
        return (loss + _cross_entropy(by_positive, queries)) / 2

    def of_queries(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None = None
    ) -> Tensor:
        """In nats. If ``symmetric``, a query and its positive add the mean of both directions."""
        loss = by_rows(self._nats, scores, positives)
        if not self.symmetric:
            return loss
        queries = torch.arange(len(positives), device=positives.device)
        return (loss + by_rows(self._nats, scores[:, positives].T, queries)) / 2

    def _nats(self, scores: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(scores / self.temperature, targets, reduction="none")


def _cross_entropy(scores: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of all rows: no number of a target stands for none, as -100 does by default."""
    return F.cross_entropy(scores, targets, ignore_index=_NO_TARGET, reduction=reduction)


@dataclass(frozen=True)
class Triplet(RankingLoss):
    """``max(0, margin - positive + negative)`` (arXiv 1703.07737, distance = minus score).

    Attributes:
        margin: by how much a positive must outscore each of its query's negatives.
    """

    needs_negatives: ClassVar[bool] = True

    margin: float = 5.0

    def __post_init__(self) -> None:
        if not (self.margin >= 0 and math.isfinite(self.margin)):
            raise ValueError(f"Triplet margin must be finite, not negative, got {self.margin}")

    def __call__(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None = None
    ) -> Tensor:
        """The arguments are those of :class:`RankingLoss`, and ``teacher_scores`` go unused. The
        result is an fp32 scalar, the mean over queries and negatives.

        Raises:
            ValueError: no negatives.
        """
        own = own_scores(scores, positives)
        return F.relu(self.margin - own[:, :1] + own[:, 1:]).mean()

    def of_queries(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None = None
    ) -> Tensor:
        """The means over each query's negatives."""
        own = own_scores(scores, positives)
        return F.relu(self.margin - own[:, :1] + own[:, 1:]).mean(1)


def own_scores(scores: Tensor, positives: Tensor) -> Tensor:
    """Each query's scores of its own 1 + K documents, ``[Q, 1 + K]``.

    Args:
        scores: ``[Q, N]``.
        positives: int64 ``[Q]``, the column of each query's positive; its negatives follow it.

    Raises:
        ValueError: K = 0.
    """
    count = scores.shape[1] // scores.shape[0]
    if count < 2:
        raise ValueError(
            "this loss compares a positive with negatives, but num_negatives=0: set num_negatives"
        )
    return scores.gather(1, positives[:, None] + torch.arange(count, device=positives.device))
