"""Which documents of a ranking become negatives.

K ranks of one query's ranking, C candidates in its window.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparton.arguments import ArgumentError, refuse_below
from sparton.datasets.teachers import check_share, share_of
from sparton.pipelines.mining.examples import Hashes

ROUNDING = 1e-5  # two sums of the same products in another order

Rows = NDArray[np.int64]
Scores = NDArray[np.float32]
# Scores of (number of a query, document row) pairs.
ScorePairs = Callable[[Sequence[tuple[int, int]]], Scores]


@dataclass(frozen=True)
class Rule:
    """How negatives are chosen.

    Attributes:
        negatives: how many of each example.
        skip, depth: the window holds ranks ``skip + 1`` to ``depth`` of the ranking without what
            is barred.
        sample: choose by chance within the window; otherwise the first ones.
        seed: of the chance.
        margin: a negative scores less than the positive by more than this; None for any.
        share: a negative scores less than this share of the positive, for example 0.95
            (NV-Retriever, arXiv 2407.15831); None for any.

    Raises:
        ArgumentError: the rule could choose nothing.
    """

    negatives: int = 7
    skip: int = 0
    depth: int = 100
    sample: bool = False
    seed: int = 0
    margin: float | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        refuse_below(1, negatives=self.negatives)
        refuse_below(0, skip=self.skip, seed=self.seed)
        if self.depth - self.skip < self.negatives:
            raise ArgumentError(
                "{skip} and {depth} leave {} ranks for {negatives}: raise {depth:name}",
                self.depth - self.skip,
                skip=self.skip,
                depth=self.depth,
                negatives=self.negatives,
            )
        if self.margin is not None and not 0 <= self.margin < np.inf:
            raise ArgumentError("{margin} must not be negative, and finite", margin=self.margin)
        check_share(self.share)

    @property
    def has_margin(self) -> bool:
        return self.margin is not None or self.share is not None

    def limit(self, positive_scores: Sequence[float]) -> float:
        """The score that every negative must stay below.

        TopK-MarginPos and TopK-PercPos of NV-Retriever (Moreira et al., arXiv 2407.15831), by the
        positive that scores least.
        """
        lowest = min(positive_scores)
        limits = [np.inf]
        if self.margin is not None:
            limits.append(lowest - self.margin)
        if self.share is not None:
            limits.append(share_of(lowest, self.share))
        limit = min(limits)
        return limit - ROUNDING * abs(limit) if np.isfinite(limit) else limit


def window(
    rule: Rule, rows: Rows, scores: Scores, hashes: Hashes, barred: Hashes, own_row: int = -1
) -> tuple[Rows, Scores]:
    """Rows and scores of the candidates ``[C]`` in the order of their rank, no text twice.

    Args:
        rule: names the window.
        rows, scores: one query's ranking ``[K]``, -1 in slots that nothing fills.
        hashes: of the collection ``[N]``.
        barred: hashes of texts that cannot be negatives.
        own_row: the row of a document that is the query itself, or -1.
    """
    found = (rows >= 0) & (rows != own_row)
    rows, scores = rows[found], scores[found]
    free = ~np.isin(hashes[rows], barred)
    rows, scores = rows[free][rule.skip : rule.depth], scores[free][rule.skip : rule.depth]
    first = np.sort(np.unique(hashes[rows], return_index=True)[1])
    return rows[first], scores[first]


def ordered(rule: Rule, candidates: int, example: int) -> NDArray[np.int64]:
    """The order in which candidates are tried; a function of the seed and the example's number, so
    that it does not matter where a run was interrupted."""
    if not rule.sample:
        return np.arange(candidates)
    return np.random.default_rng([rule.seed, example]).permutation(candidates)


class Choice(NamedTuple):
    """Rows that were taken, their scores in the same order, and how many exceeded the limit."""

    rows: list[list[int]]
    scores: list[list[float]]
    refused: int


def choose(
    rule: Rule, candidates: Sequence[Rows], limits: Sequence[float], score: ScorePairs
) -> Choice:
    """Each query's first ``rule.negatives`` candidates that score below its limit.

    Only as many candidates are scored as are needed: in each round, as many of each query's next
    ones as it still lacks. What is taken is a fair sample if the order is by chance.
    """
    taken: list[list[int]] = [[] for _ in candidates]
    scores: list[list[float]] = [[] for _ in candidates]
    tried = [0] * len(candidates)
    refused = 0
    while True:
        pairs = []
        for query, rows in enumerate(candidates):
            last = tried[query] + rule.negatives - len(taken[query])
            pairs += [(query, int(row)) for row in rows[tried[query] : last]]
            tried[query] = min(last, len(rows))
        if not pairs:
            return Choice(taken, scores, refused)
        for (query, row), value in zip(pairs, score(pairs).tolist()):
            if value < limits[query]:
                taken[query].append(row)
                scores[query].append(value)
            else:
                refused += 1
