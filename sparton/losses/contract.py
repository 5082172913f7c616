"""What the objective asks of a loss, and what it shows to it.

Q queries, N documents of the global batch, grouped by query, the positive first. N = Q * (1 + K)
unless some queries have no negatives of their own, which no loss is shown that ``needs_negatives``.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from sparton.representations import Representations


class Scored(NamedTuple):
    """A global batch as losses see it.

    Attributes:
        queries, documents: the representations of both sides.
        scores: fp32 ``[Q, N]`` for each half that representations have, "sparse" by dot product,
            "tokens" by MaxSim, "dense" by dot product.
        positives: int64 ``[Q]``, the column of each query's positive; its negatives follow it.
        teacher_scores: fp32 ``[Q, 1 + K]``, the positive's first, or None.
        score_weights: of the halves in :attr:`total_scores`; 1 where a half is not named.
    """

    queries: Representations
    documents: Representations
    scores: Mapping[str, Tensor]
    positives: Tensor
    teacher_scores: Tensor | None = None
    score_weights: Mapping[str, float] = {}

    @property
    def total_scores(self) -> Tensor:
        """The weighted sum of the scores of all halves, ``[Q, N]``."""
        weights = self.score_weights
        parts = (weights.get(half, 1.0) * scores for half, scores in self.scores.items())
        return reduce(torch.add, parts)


class Term(NamedTuple):
    """A summand of what is minimised: an fp32 scalar, and the weight that multiplies it."""

    value: Tensor
    weight: float = 1.0


class Loss(Protocol):
    """A loss of a whole batch, of its scores or of the representations themselves."""

    @property
    def needs_negatives(self) -> bool:
        """Compares a query's positive with its own K >= 1 explicit negatives, which all have."""
        ...

    @property
    def needs_teacher(self) -> bool:
        """Follows a teacher's scores."""
        ...

    @property
    def halves(self) -> frozenset[str]:
        """The halves that representations must have, and no others; empty where any do."""
        ...

    def terms(self, batch: Scored) -> dict[str, Term]:
        """The summands by name, for the log."""
        ...

    def by_query(self, batch: Scored) -> Tensor | None:
        """What each query adds, for the log of sources: fp32 ``[Q]``, whose mean is the weighted
        sum of the terms; None where queries cannot be told apart."""
        ...


def checked_loss(loss: object) -> Loss:
    """The same, if it has all that a loss has, and no weights of its own.

    Raises:
        ValueError: it has not, or has such weights.
    """
    needed = ("needs_negatives", "needs_teacher", "halves", "terms", "by_query")
    if lacking := [name for name in needed if not hasattr(loss, name)]:
        raise ValueError(
            f"{type(loss).__name__} is no loss, since it has no {', '.join(lacking)}: make a loss "
            "of scores a subclass of sparton.losses.ranking.RankingLoss, and give one of "
            "representations what sparton.losses.contract.Loss has"
        )
    refuse_weights(loss)
    return cast(Loss, loss)


def refuse_weights(part: object) -> None:
    """Refuse a loss or a penalty with weights of its own, which would stay as they are in silence.

    Raises:
        ValueError: it is a module of PyTorch with a parameter that is to be trained.
    """
    own = part.named_parameters() if isinstance(part, nn.Module) else ()
    if learning := [name for name, weight in own if weight.requires_grad]:
        raise ValueError(
            f"{type(part).__name__} has weights of its own, {', '.join(learning)}, but a training "
            "learns those of the encoder alone: make them numbers, or buffers of the module"
        )


def scalar(value: object, name: str) -> Tensor:
    """The same, if it is one number: of several, the sum would be minimised in silence.

    Args:
        name: what to call it in the message.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, Tensor) and not value.ndim:
        return value
    found = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ValueError(
        f"{name} must be a tensor without axes, one number for the whole batch, got {found}: take "
        "the mean of several"
    )


def each_query(value: object, name: str, queries: int) -> Tensor:
    """The same, if it is one number for each query: the log would count others wrongly.

    Args:
        name: what to call it in the message.
        queries: how many there are.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, Tensor) and value.shape == (queries,):
        return value
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ValueError(
        f"of_queries of {name} must give one number for each of {queries} queries, got {found}: "
        "reduce no axis but that of the documents, or return None"
    )


def refuse_constant(value: Tensor, name: str, given: Iterable[Tensor]) -> None:
    """Refuse a summand from which nothing would learn: beside others, it would be in the log alone.

    Args:
        name: what to call it in the message.
        given: what it was computed from.

    Raises:
        ValueError: it has no gradient, though ``given`` ask for one.
    """
    if value.requires_grad or not torch.is_grad_enabled():
        return
    if any(x.requires_grad for x in given):
        raise ValueError(
            f"{name} has no gradient, so nothing would learn from it: compute it from its "
            "arguments by operations of torch that can be differentiated, without detach, item or "
            "no_grad"
        )


def total(terms: Mapping[str, Term]) -> Tensor:
    """The weighted sum of at least one term; fp32 scalar.

    Raises:
        ValueError: a term is not one number.
    """
    parts = [weight * scalar(value, f"the loss {name}") for name, (value, weight) in terms.items()]
    return torch.stack(parts).sum()
