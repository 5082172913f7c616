"""Is one system better than another? Paired tests over the queries of tasks.

Q queries, B draws.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = Mapping[str, float]  # of queries, by id
Tasks = Mapping[str, Mapping[str, Values]]  # task to metric to values
Floats = NDArray[np.float64]

_DRAWS = 10_000
_AT_ONCE = 1 << 22  # numbers of a draw that are in memory together
_EXACT = 13  # queries that differ up to which all signs are tried
_DIGITS = 12  # of a difference; what is left of one beyond them is a tie


class QueryChange(NamedTuple):
    """What a query came to in two systems."""

    query: str
    baseline: float
    other: float


class TaskComparison(NamedTuple):
    """Two systems on the queries of one task.

    Attributes:
        task: its name.
        queries: Q.
        baseline, other: mean over the queries.
        interval: of the difference of the means, 95 %, by the percentiles of 10,000 paired
            bootstrap samples.
        t_test: p of the paired t-test, two-sided.
        randomization: p of the paired randomisation test of the means, two-sided: of all signs of
            the differences where few differ, else of 10,000 draws (Smucker et al., CIKM 2007).
        adjusted: the latter after Holm's correction for all comparisons that were made together.
        wins, ties, losses: queries in which the other system is better, alike, or worse.
        changes: of the queries that are not alike, the largest gain first and the largest loss
            last.
    """

    task: str
    queries: int
    baseline: float
    other: float
    interval: tuple[float, float]
    t_test: float
    randomization: float
    adjusted: float
    wins: int
    ties: int
    losses: int
    changes: list[QueryChange]

    @property
    def difference(self) -> float:
        return self.other - self.baseline


def compare_systems(
    systems: Mapping[str, Tasks],
    metric: str = "ndcg@10",
    tasks: Sequence[str] = (),
    seed: int = 0,
) -> dict[str, list[TaskComparison]]:
    """Every other system with the first, the baseline, on every task that all of them have.

    Args:
        systems: by name, as :func:`sparton.evaluation.results.read_queries` gives each.
        metric: what is compared.
        tasks: names of tasks; none for all that every system has.
        seed: of the draws.

    Returns:
        for each of the others, by name, one comparison per task.

    Raises:
        ValueError: a single system, no task in common, a metric or task that one of them lacks, or
            other queries.
    """
    if len(systems) < 2:
        raise ValueError(f"there is nothing to compare {' '.join(systems)} with")
    (first, baseline), *others = systems.items()
    names = list(tasks) or [
        name for name in baseline if all(name in each for each in systems.values())
    ]
    if not names:
        had = "; ".join(f"{name}: {', '.join(each)}" for name, each in systems.items())
        raise ValueError(f"there is no task that all have ({had})")
    for name in names:
        _check(name, metric, systems, first)
    compared = {
        system: [_compare(name, baseline[name][metric], own[name][metric], seed) for name in names]
        for system, own in others
    }
    values = [each.randomization for rows in compared.values() for each in rows]
    adjusted = iter(holm(values))
    return {
        system: [each._replace(adjusted=next(adjusted)) for each in rows]
        for system, rows in compared.items()
    }


def _check(task: str, metric: str, systems: Mapping[str, Tasks], first: str) -> None:
    for name, own in systems.items():
        if task not in own:
            raise ValueError(f"{name} has no task {task}: it has {', '.join(own)}")
        if metric not in own[task]:
            raise ValueError(f"{name} has no {metric} of {task}: it has {', '.join(own[task])}")
        asked, theirs = systems[first][task][metric], own[task][metric]
        if asked.keys() != theirs.keys():
            shared = len(asked.keys() & theirs.keys())
            raise ValueError(
                f"the queries of {task} differ: {first} has {len(asked)} and {name} has "
                f"{len(theirs)}, {shared} of them the same. Evaluate both on the same judgments"
            )


def _compare(task: str, baseline: Values, other: Values, seed: int) -> TaskComparison:
    queries = list(baseline)
    one = np.array([baseline[query] for query in queries])
    two = np.array([other[query] for query in queries])
    differences = np.round(two - one, _DIGITS)
    order = np.argsort(-differences, kind="stable")
    changed = [row for row in order.tolist() if differences[row]]
    randomization = randomization_test(differences, seed)
    return TaskComparison(
        task,
        len(queries),
        float(one.mean()),
        float(two.mean()),
        bootstrap_interval(differences, seed),
        t_test(differences),
        randomization,
        randomization,
        int((differences > 0).sum()),
        int((differences == 0).sum()),
        int((differences < 0).sum()),
        [QueryChange(queries[row], float(one[row]), float(two[row])) for row in changed],
    )


def t_test(differences: Floats) -> float:
    """Two-sided p of the paired t-test, of differences ``[Q]``: 1 where there is no difference, NaN
    of a single query."""
    from scipy.stats import ttest_1samp

    if not differences.any():
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single query, or differences that are all the same
        return float(ttest_1samp(differences, 0.0).pvalue)


def randomization_test(differences: Floats, seed: int = 0) -> float:
    """Two-sided p: how often the mean is as far from 0 as it is if every difference ``[Q]`` had its
    sign by chance."""
    differing = differences[differences != 0]
    if not differing.size:
        return 1.0
    least = abs(differing.sum()) * (1 - 1e-9)  # sums in another order round otherwise
    if differing.size <= _EXACT:
        signs = 2.0 * _all_bits(differing.size) - 1
        return float(np.mean(np.abs(signs @ differing) >= least))
    generator = np.random.default_rng(seed)
    extreme = 0
    for count in _counts(differing.size):
        signs = 2.0 * generator.integers(0, 2, (count, differing.size), np.int8) - 1
        extreme += int((np.abs(signs @ differing) >= least).sum())
    return (extreme + 1) / (_DRAWS + 1)  # what was observed is one of the draws


def bootstrap_interval(differences: Floats, seed: int = 0) -> tuple[float, float]:
    """2.5 and 97.5 percent of the means of samples with replacement of differences ``[Q]``."""
    generator = np.random.default_rng(seed)
    means = [
        differences[generator.integers(0, differences.size, (count, differences.size))].mean(axis=1)
        for count in _counts(differences.size)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def holm(values: Sequence[float]) -> list[float]:
    """p values after Holm's step-down correction (1979), in their order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = highest
    return adjusted


def _counts(size: int) -> Iterator[int]:
    """B draws of ``size`` numbers, in parts that fit into memory."""
    step = max(1, _AT_ONCE // size)
    for start in range(0, _DRAWS, step):
        yield min(step, _DRAWS - start)


def _all_bits(size: int) -> NDArray[np.int64]:
    return (np.arange(2**size)[:, None] >> np.arange(size)) & 1
