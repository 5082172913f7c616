"""Ranking losses: functions of scores alone, whatever model made them.

Q queries, N = Q * (1 + K) documents of the global batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class InfoNCE:
    """Cross entropy of the positive among all documents of the global batch (arXiv 1807.03748).

    Attributes:
        temperature: scores are divided by it.
        symmetric: also ask every positive for its query among all queries; the mean of both.
    """

    temperature: float = 1.0
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"InfoNCE temperature must be positive, got {self.temperature}")

    def __call__(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            scores: fp32 ``[Q, N]``.
            positives: int64 ``[Q]``, the column of each query's positive.
            teacher_scores: not used; all ranking losses are called alike.

        Returns:
            fp32 scalar, in nats.
        """
        scores = scores / self.temperature
        loss = F.cross_entropy(scores, positives)
        if not self.symmetric:
            return loss
        by_positive = scores[:, positives].T
        queries = torch.arange(len(positives), device=positives.device)
        return (loss + F.cross_entropy(by_positive, queries)) / 2
