"""Sparsity penalties on representations, and the weight each gets at a step.

B rows of the global batch, V vocabulary terms. Every penalty is defined on the whole global batch:
FLOPS squares a batch mean, so the mean of the penalties of its parts is another number. ``reps``,
fp32 ``[B, V]``, not negative, may hold their active entries alone; see :mod:`.rows`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sparton.losses.contract import refuse_weights
from sparton.losses.ramps import ConstantRamp
from sparton.losses.rows import Rows, active_terms, column_means, document_frequency, row_totals


def flops(reps: Rows) -> Tensor:
    """``sum_v (mean_b reps[b, v]) ** 2`` (Paria et al., arXiv 2004.05665); fp32 scalar."""
    return column_means(reps).square().sum()


def flops_of_sums(reps: Rows) -> Tensor:
    """``mean_v (sum_b reps[b, v]) ** 2``, what the public sample of the Sparton paper's authors
    calls FLOPS; fp32 scalar.

    That is ``B ** 2 / V`` times :func:`flops`, 8.6 times for 512 texts over 30,522 terms: it grows
    with the batch, which FLOPS does not.
    """
    texts = reps.shape[0] if isinstance(reps, Tensor) else reps.num_vectors
    return (texts * column_means(reps)).square().mean()


@dataclass(frozen=True)
class L0Flops:
    """FLOPS of the rows that are not yet sparse (arXiv 2504.14839).

    Rows with at most ``threshold`` active terms count as zeros: they get no gradient, but stay in
    the mean. sentence-transformers calls it ``document_regularizer_threshold``.

    Attributes:
        threshold: active terms up to which a row is left alone; 0 is plain FLOPS.
    """

    threshold: int

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ValueError(f"L0Flops threshold must not be negative, got {self.threshold}")

    def __call__(self, reps: Rows) -> Tensor:
        return column_means(reps, active_terms(reps) > self.threshold).square().sum()


def l1(reps: Rows) -> Tensor:
    """``mean_b sum_v reps[b, v]``; representations are not negative, so no absolute value."""
    return row_totals(reps).mean()


def anti_zero(reps: Rows) -> Tensor:
    """``mean_b 1 / (1 + sum_v reps[b, v]) ** 2``: 1 for a row of zeros, 0 for a large one.

    Keeps rows away from zero while sparsity is enforced. A row that is entirely zero passes no
    gradient through the ReLU, so this prevents death; it cannot raise the dead.
    """
    return (1 + row_totals(reps)).pow(-2).mean()


@dataclass(frozen=True)
class DFFlops:
    """FLOPS with terms weighted by document frequency (DF-FLOPS, Porco et al., arXiv 2505.15070).

    ``sum_v (w_v mean_b reps[b, v]) ** 2`` with ``w = 1 / (1 + (df ** log_midpoint(2) - 1) **
    steepness)``: 0 for rare terms, 1/2 where a share ``midpoint`` of the documents has the term,
    1 for terms of every document. The document frequency is that of the global batch, which keeps
    the penalty a pure function of the batch (the paper estimates it periodically, on the documents
    of its validation).

    Attributes:
        midpoint: share of documents, in (0, 1), at which the weight is one half; the paper's alpha.
        steepness: exponent of the transition; the paper's beta.
    """

    midpoint: float = 0.1
    steepness: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.midpoint < 1:
            raise ValueError(f"DFFlops midpoint must lie in (0, 1), got {self.midpoint}")
        if not 0 < self.steepness < math.inf:
            raise ValueError(f"DFFlops steepness must be positive and finite, got {self.steepness}")

    def __call__(self, reps: Rows) -> Tensor:
        frequency = document_frequency(reps)
        exponent = math.log(2) / math.log(self.midpoint)
        rarity = (frequency.clamp_min(1e-4).pow(exponent) - 1).clamp_min(0)
        weights = 1 / (1 + rarity.pow(self.steepness))
        return (weights * column_means(reps)).square().sum()


@dataclass(frozen=True)
class Regularizer:
    """A penalty times its weight at the step.

    Attributes:
        penalty: ``reps [B, V] -> scalar``.
        weight: lambda, the weight once the ramp is complete.
        ramp: ``step -> factor in [0, 1]``.
    """

    penalty: Callable[[Rows], Tensor]
    weight: float
    ramp: Callable[[int], float] = ConstantRamp()  # noqa: RUF009  frozen, so it can be shared

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"a regularizer's weight must not be negative, got {self.weight}")
        refuse_weights(self.penalty)

    def weight_at(self, step: int) -> float:
        return self.weight * self.ramp(step)
