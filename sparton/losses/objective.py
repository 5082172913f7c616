"""The objective of a training step, evaluated once on the representations of the global batch.

Q queries, N documents, V vocabulary terms, T packed tokens. N = Q * (1 + K) unless queries have
different numbers of documents.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.maxsim import maxsim_varlen
from sparton.losses.contract import Loss, Scored, checked_loss, refuse_constant, scalar, total
from sparton.losses.regularizers import Regularizer
from sparton.losses.rows import dot_scores
from sparton.representations import Representations, TokenVectors


class ObjectiveValue(NamedTuple):
    """What the objective says of a global batch, still on the device.

    Attributes:
        loss: the scalar to minimise.
        parts: of it, by name, detached and without their weights.
        positives: int64 ``[Q]``, the number of each query's positive among the documents.
        by_query: the ranking loss of each query, fp32 ``[Q]``, if it was asked for and there is
            such a thing.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    positives: Tensor
    by_query: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """A ranking loss plus regularizers on sparse representations, plus the encoder's own losses.

    Attributes:
        ranking: the loss of the scores, or of the representations. Where it has several terms, they
            become parts ``ranking_<name>``.
        query_regularizers, document_regularizers: the penalties of each side, by the names that the
            log shows.
        own_losses: weights of the losses that the representations bring along, by name.
        widths: how many of the first components of token vectors have a ranking loss of their own,
            of the same weight: parts ``ranking_width_<number>``.
        score_weights: of the halves in the sum of their scores, for losses that look at it.
    """

    ranking: Loss
    query_regularizers: Mapping[str, Regularizer] = field(default_factory=dict)
    document_regularizers: Mapping[str, Regularizer] = field(default_factory=dict)
    own_losses: Mapping[str, float] = field(default_factory=dict)
    widths: tuple[int, ...] = ()
    score_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked_loss(self.ranking)

    def __call__(
        self,
        queries: Representations,
        documents: Representations,
        step: int,
        teacher_scores: Tensor | None = None,
        *,
        counts: Tensor | None = None,
        by_query: bool = False,
    ) -> ObjectiveValue:
        """
        Args:
            queries: the representations of Q texts.
            documents: the representations of N texts, grouped by query, the positive first.
            step: decides the regularizers' weights.
            teacher_scores: fp32 ``[Q, 1 + K]``, for ranking losses that follow a teacher.
            counts: int64 ``[Q]``, how many documents each query has; None for as many as another.
            by_query: also say the ranking loss of each query.

        Raises:
            ValueError: N is not a multiple of Q and there are no ``counts``, or there are with a
                loss that compares every query with negatives of its own; or a loss or a penalty is
                not one number, or has no gradient though the representations ask for one.
        """
        positives = self._positives(queries, documents, counts)
        device = positives.device
        # Dot products over 30,000 terms overflow fp16 and lose their order in bf16.
        with torch.autocast(device.type, enabled=False):
            scored = self._scored(queries, documents, positives, teacher_scores)
            terms = self.ranking.terms(scored)
            with torch.no_grad():
                of_queries = self.ranking.by_query(scored) if by_query else None
            loss, given = total(terms), (*queries.leaves(), *documents.leaves())
            for name, term in terms.items():
                refuse_constant(term.value, f"the loss {name}", given)
            parts = {"ranking": loss.detach()}
            if len(terms) > 1:
                parts |= {f"ranking_{name}": term.value.detach() for name, term in terms.items()}
            for width in self.widths:
                asked, answers = _first(queries, width), _first(documents, width)
                narrow = self._scored(asked, answers, positives, teacher_scores)
                part = total(self.ranking.terms(narrow))
                loss = loss + part
                parts[f"ranking_width_{width}"] = part.detach()
            for penalty, weight, name in self._penalties(queries, documents, step):
                loss = loss + weight * penalty
                parts[name] = penalty.detach()
        return ObjectiveValue(loss, parts, positives, of_queries)

    def _scored(
        self,
        queries: Representations,
        documents: Representations,
        positives: Tensor,
        teacher_scores: Tensor | None,
    ) -> Scored:
        scores = all_scores(queries, documents)
        return Scored(queries, documents, scores, positives, teacher_scores, self.score_weights)

    def _positives(
        self, queries: Representations, documents: Representations, counts: Tensor | None
    ) -> Tensor:
        device = queries.leaves()[0].device
        if counts is not None:
            if self.ranking.needs_negatives:
                raise ValueError(
                    f"{type(self.ranking).__name__} compares every query with negatives of its "
                    "own, but here some have none: leave them out, or take another loss, such as "
                    "InfoNCE"
                )
            return counts.cumsum(0) - counts
        texts = queries.num_texts, documents.num_texts
        if texts[1] % texts[0]:
            raise ValueError(f"{texts[1]} documents cannot be grouped by {texts[0]} queries")
        return torch.arange(texts[0], device=device) * (texts[1] // texts[0])

    def _penalties(
        self, queries: Representations, documents: Representations, step: int
    ) -> Iterator[tuple[Tensor, float, str]]:
        """Each with its weight and its name in the log."""
        for side, reps, regularizers in (
            ("query", queries.sparse, self.query_regularizers),
            ("document", documents.sparse, self.document_regularizers),
        ):
            if reps is None:
                continue
            if isinstance(reps, Tensor):
                reps = reps.float()
            weights = reps if isinstance(reps, Tensor) else reps.values
            for name, regularizer in regularizers.items():
                penalty = scalar(regularizer.penalty(reps), f"the penalty {side}_{name}")
                refuse_constant(penalty, f"the penalty {side}_{name}", [weights])
                yield penalty, regularizer.weight_at(step), f"{side}_{name}"
        for name, weight in self.own_losses.items():
            yield torch.cat([queries.losses[name], documents.losses[name]]).mean(), weight, name

    def weights_at(self, step: int) -> dict[str, float]:
        """The regularizers' weights, ``lambda_q_*`` and ``lambda_d_*``, for the log."""
        sides = (("lambda_q", self.query_regularizers), ("lambda_d", self.document_regularizers))
        return {
            f"{symbol}_{name}": regularizer.weight_at(step)
            for symbol, regularizers in sides
            for name, regularizer in regularizers.items()
        }


def _first(representations: Representations, width: int) -> Representations:
    assert representations.tokens is not None, "only token vectors have several widths"
    return representations._replace(tokens=representations.tokens.first(width))


def all_scores(queries: Representations, documents: Representations) -> dict[str, Tensor]:
    """Every query against every document, fp32 ``[Q, N]``, for each kind of representation:
    ``sparse`` by dot product, ``tokens`` by MaxSim, ``dense`` by dot product."""
    scores = {}
    if queries.sparse is not None and documents.sparse is not None:
        scores["sparse"] = dot_scores(queries.sparse, documents.sparse)
    if queries.tokens is not None and documents.tokens is not None:
        scores["tokens"] = _maxsim(queries.tokens, documents.tokens)
    if queries.dense is not None and documents.dense is not None:
        scores["dense"] = dot_scores(queries.dense.values, documents.dense.values)
    return scores


def _maxsim(queries: TokenVectors, documents: TokenVectors) -> Tensor:
    return maxsim_varlen(
        queries.values,
        documents.values,
        queries.cu_seqlens,
        documents.cu_seqlens,
        queries.mask,
        documents.mask,
        query_max_seqlen=queries.max_seqlen,
        document_max_seqlen=documents.max_seqlen,
    )
