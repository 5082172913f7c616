"""Paired tests against scipy's, and what is refused."""

import itertools

import numpy as np
import pytest
from scipy import stats

from sparton.evaluation.comparison import (
    bootstrap_interval,
    compare_systems,
    holm,
    randomization_test,
    t_test,
)

GENERATOR = np.random.default_rng(7)
MANY = GENERATOR.normal(0.03, 0.2, 150)


def system(values, task: str = "a", metric: str = "ndcg@10") -> dict:
    return {task: {metric: {f"q{number}": float(value) for number, value in enumerate(values)}}}


def mean(values, axis):
    return np.mean(values, axis=axis)


def test_the_t_test_is_that_of_scipy():
    base = GENERATOR.random(150)
    other = base + MANY
    assert t_test(other - base) == pytest.approx(stats.ttest_rel(other, base).pvalue)
    assert t_test(np.zeros(9)) == 1 and np.isnan(t_test(np.ones(1)))
    assert t_test(np.full(9, 0.1)) < 1e-9


def test_the_randomization_test_tries_all_signs_where_few_differ():
    for size in (1, 4, 9):
        values = GENERATOR.normal(0.5, 1, size)
        signs = itertools.product((-1, 1), repeat=size)
        sums = np.array([abs(np.dot(sign, values)) for sign in signs])
        expected = np.mean(sums >= abs(values.sum()) - 1e-12)
        padded = np.concatenate([values, np.zeros(50)])
        assert randomization_test(padded) == pytest.approx(expected)
    assert randomization_test(np.zeros(20)) == 1


def test_the_randomization_test_draws_signs_where_many_differ():
    expected = stats.permutation_test(
        (MANY,), mean, permutation_type="samples", n_resamples=20_000, rng=1
    ).pvalue
    found = randomization_test(MANY)
    # Four standard deviations of the difference of two shares of draws.
    assert found == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 6_667) ** 0.5)
    assert randomization_test(MANY) == found and found != randomization_test(MANY, seed=1)
    assert randomization_test(np.full(200, 0.1)) == pytest.approx(1 / 10_001)


def test_what_is_chance_is_called_chance_as_often_as_it_should():
    values = [randomization_test(GENERATOR.normal(0, 1, 40), seed) for seed in range(200)]
    low = sum(value < 0.05 for value in values)
    assert 1 <= low <= 22  # of 10 expected, within four standard deviations
    assert np.mean(values) == pytest.approx(0.5, abs=0.09)


def test_the_interval_is_that_of_scipy():
    expected = stats.bootstrap(
        (MANY,), np.mean, method="percentile", n_resamples=20_000, rng=1
    ).confidence_interval
    found = bootstrap_interval(MANY)
    assert found == pytest.approx(tuple(expected), abs=0.002)
    assert found[0] < MANY.mean() < found[1]
    assert found == bootstrap_interval(MANY)


def test_memory_bounds_the_draws_and_changes_nothing(monkeypatch):
    whole = bootstrap_interval(MANY), randomization_test(MANY)
    monkeypatch.setattr("sparton.evaluation.comparison._AT_ONCE", 1000)
    assert bootstrap_interval(MANY) == pytest.approx(whole[0])
    assert randomization_test(MANY) == pytest.approx(whole[1], abs=0.02)


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_systems_are_compared_task_by_task_and_corrected_together():
    base = GENERATOR.random(60)
    gains = base + GENERATOR.normal(0.2, 0.1, 60)
    noise = base + GENERATOR.normal(0, 0.1, 60)
    baseline = system(base) | system(base, "b") | system(base, "only here")
    compared = compare_systems(
        {
            "baseline": baseline,
            "better": system(gains) | system(base, "b"),
            "the same": system(noise) | system(noise, "b"),
        }
    )
    assert {name: [row.task for row in rows] for name, rows in compared.items()} == {
        "better": ["a", "b"],
        "the same": ["a", "b"],
    }
    better, alike = compared["better"]
    assert better.difference == pytest.approx((gains - base).mean())
    assert (better.queries, better.wins, better.ties, better.losses) == (
        60,
        (gains > base).sum(),
        0,
        (gains < base).sum(),
    )
    assert better.adjusted == pytest.approx(4 * better.randomization) and better.adjusted < 0.01
    assert (alike.ties, alike.t_test, alike.randomization, alike.adjusted) == (60, 1, 1, 1)
    assert alike.changes == [] and alike.interval == (0, 0)
    assert all(row.adjusted > 0.05 for row in compared["the same"])


def test_the_queries_that_change_most():
    (row,) = compare_systems(
        {"x": system([0.5, 0.5, 0.5, 0.5]), "y": system([0.9, 0.1, 0.5, 0.6])}
    )["y"]
    assert [each.query for each in row.changes] == ["q0", "q3", "q1"]
    assert row.changes[0][1:] == (0.5, 0.9)


@pytest.mark.parametrize(
    ("others", "settings", "message"),
    [
        ({}, {}, "there is nothing to compare x with"),
        ({"y": system([1, 2], "b")}, {}, r"there is no task that all have \(x: a; y: b\)"),
        ({"y": system([1, 2])}, {"tasks": ["b"]}, "x has no task b: it has a"),
        ({"y": system([1, 2])}, {"metric": "map"}, "x has no map of a: it has ndcg@10"),
        (
            {"y": system([1, 2, 3])},
            {},
            "queries of a differ: x has 2 and y has 3, 2 of them the same",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(others, settings, message):
    with pytest.raises(ValueError, match=message):
        compare_systems({"x": system([1, 2]), **others}, **settings)
