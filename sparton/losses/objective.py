"""The objective of a training step, evaluated once on the representations of the global batch.

Q queries, N = Q * (1 + K) documents, V vocabulary terms.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sparton.losses.combination import WeightedSum
from sparton.losses.ranking import RankingLoss
from sparton.losses.regularizers import Regularizer


class ObjectiveValue(NamedTuple):
    """The scalar to minimise and its named parts (detached, unweighted), still on the device."""

    loss: Tensor
    parts: dict[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """A ranking loss plus regularizers on query and document representations.

    Attributes:
        ranking: of the scores; the losses of a weighted sum become parts ``ranking_<name>``.
        query_regularizers, document_regularizers: by name, for the log.
    """

    ranking: RankingLoss
    query_regularizers: Mapping[str, Regularizer] = field(default_factory=dict)
    document_regularizers: Mapping[str, Regularizer] = field(default_factory=dict)

    def __call__(
        self, queries: Tensor, documents: Tensor, step: int, teacher_scores: Tensor | None = None
    ) -> ObjectiveValue:
        """
        Args:
            queries: ``[Q, V]``.
            documents: ``[N, V]``, grouped by query, the positive first.
            step: decides the regularizers' weights.
            teacher_scores: fp32 ``[Q, 1 + K]``, for ranking losses that follow a teacher.

        Raises:
            ValueError: N is not a multiple of Q.
        """
        if documents.shape[0] % queries.shape[0]:
            raise ValueError(
                f"{documents.shape[0]} documents cannot be grouped by {queries.shape[0]} queries"
            )
        # Dot products over 30,000 terms overflow fp16 and lose their order in bf16.
        with torch.autocast(queries.device.type, enabled=False):
            queries, documents = queries.float(), documents.float()
            documents_per_query = documents.shape[0] // queries.shape[0]
            positives = torch.arange(queries.shape[0], device=queries.device) * documents_per_query
            loss, parts = self._rank(queries @ documents.T, positives, teacher_scores)
            for side, reps, regularizers in (
                ("query", queries, self.query_regularizers),
                ("document", documents, self.document_regularizers),
            ):
                for name, regularizer in regularizers.items():
                    penalty = regularizer.penalty(reps)
                    loss = loss + regularizer.weight_at(step) * penalty
                    parts[f"{side}_{name}"] = penalty.detach()
        return ObjectiveValue(loss, parts)

    def _rank(
        self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None
    ) -> ObjectiveValue:
        if not isinstance(self.ranking, WeightedSum):
            loss = self.ranking(scores, positives, teacher_scores)
            return ObjectiveValue(loss, {"ranking": loss.detach()})
        named = self.ranking.parts(scores, positives, teacher_scores)
        loss = self.ranking.total(named)
        parts = {f"ranking_{name}": part.detach() for name, part in named.items()}
        return ObjectiveValue(loss, {"ranking": loss.detach(), **parts})

    def weights_at(self, step: int) -> dict[str, float]:
        """The regularizers' weights, ``lambda_q_*`` and ``lambda_d_*``, for the log."""
        sides = (("lambda_q", self.query_regularizers), ("lambda_d", self.document_regularizers))
        return {
            f"{symbol}_{name}": regularizer.weight_at(step)
            for symbol, regularizers in sides
            for name, regularizer in regularizers.items()
        }
