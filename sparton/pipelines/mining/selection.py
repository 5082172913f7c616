"""Which documents of a ranking become negatives.

Q queries, K ranks of each, C candidates in the windows of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparton.arguments import ArgumentError, refuse_below
from sparton.datasets.teachers import check_share, share_of
from sparton.pipelines.mining.examples import Barred, Hashes, keys_of, ranges

ROUNDING = 1e-5  # two sums of the same products in another order

Rows = NDArray[np.int64]
Scores = NDArray[np.float32]
# Scores of candidates by their places among those of all queries.
ScorePlaces = Callable[[Rows], Scores]


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
        check_share(share=self.share)

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


class Windows(NamedTuple):
    """Candidates of Q queries, end to end and by rank, no text of a query twice.

    Attributes:
        sizes: how many each query has, int64 ``[Q]``.
        rows: of the documents, int64 ``[C]``.
        scores: fp32 ``[C]``.
    """

    sizes: Rows
    rows: Rows
    scores: Scores


def windows(
    rule: Rule, rows: Rows, scores: Scores, hashes: Hashes, barred: Barred, own_rows: Rows
) -> Windows:
    """The candidates of each query.

    Args:
        rule: names the window.
        rows, scores: rankings ``[Q, K]``, -1 in slots that nothing fills.
        hashes: of the collection ``[N]``.
        barred: texts that cannot be negatives.
        own_rows: of each query the row of a document that is the query itself, or -1; ``[Q]``.
    """
    keys = keys_of(np.arange(len(rows))[:, None], hashes[rows])
    free = (rows >= 0) & (rows != own_rows[:, None]) & ~np.isin(keys, keys_of(*barred))
    rank = np.cumsum(free, axis=1)
    places = np.flatnonzero(free & (rank > rule.skip) & (rank <= rule.depth))
    first = np.sort(np.unique(keys.ravel()[places], return_index=True)[1])
    queries, slots = np.unravel_index(places[first], rows.shape)
    sizes = np.bincount(queries, minlength=len(rows))
    return Windows(sizes, rows[queries, slots], scores[queries, slots])


def ordered(rule: Rule, candidates: int, example: int) -> NDArray[np.int64]:
    """The order in which candidates are tried; a function of the seed and the example's number, so
    that it does not matter where a run was interrupted."""
    if not rule.sample:
        return np.arange(candidates)
    return np.random.default_rng([rule.seed, example]).permutation(candidates)


class Choice(NamedTuple):
    """Places of candidates that were taken, of each query in the order in which they were tried,
    their scores in the same order, and how many exceeded the limit."""

    places: list[Rows]
    scores: list[Scores]
    refused: int


def choose(rule: Rule, sizes: Rows, limits: Sequence[float] | None, score: ScorePlaces) -> Choice:
    """Each query's first ``rule.negatives`` candidates that score below its limit.

    Only as many candidates are scored as are needed: in each round, as many of each query's next
    ones as it still lacks. What is taken is a fair sample if the order is by chance.

    Args:
        rule: says how many.
        sizes: how many candidates each query has, int64 ``[Q]``; they lie end to end in the order
            in which they are tried.
        limits: of the scores of each query ``[Q]``; None for none.
        score: gives scores fp32 ``[P]`` of the candidates at places int64 ``[P]``.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = tried = ends - sizes
    most = np.full(len(ends), np.inf) if limits is None else np.asarray(limits, np.float64)
    owners = np.repeat(np.arange(len(ends)), sizes)
    scores, taken = np.zeros(len(owners), np.float32), np.zeros(len(owners), bool)
    lacking, refused = np.full(len(ends), rule.negatives), 0
    while (places := ranges(tried, np.minimum(tried + lacking, ends))).size:
        tried = np.minimum(tried + lacking, ends)
        scores[places] = score(places)
        fits = scores[places] < most[owners[places]]
        taken[places] = fits
        refused += int((~fits).sum())
        lacking -= np.bincount(owners[places[fits]], minlength=len(ends))
    found = [np.flatnonzero(taken[first:last]) + first for first, last in zip(starts, ends)]
    return Choice(found, [scores[places] for places in found], refused)
