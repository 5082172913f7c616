"""Metrics against definitions written out here."""

import inspect
import math
import random
import re

import numpy as np
import pytest

from sparton.retrieval.metrics import (
    METRICS,
    NAMES,
    evaluate_queries,
    evaluate_run,
    metric_depth,
)
from sparton.retrieval.run import Run


def ndcg(grades: dict[str, int], ranking: list[str], depth: int, gain=float) -> float:
    def dcg(values: list[int]) -> float:
        return sum(gain(max(g, 0)) / math.log2(rank + 2) for rank, g in enumerate(values[:depth]))

    ideal = dcg(sorted(grades.values(), reverse=True))
    return dcg([grades.get(name, 0) for name in ranking]) / ideal if ideal else 0.0


def mrr(grades: dict[str, int], ranking: list[str], depth: int) -> float:
    for rank, name in enumerate(ranking[:depth]):
        if grades.get(name, 0) > 0:
            return 1 / (rank + 1)
    return 0.0


def recall(grades: dict[str, int], ranking: list[str], depth: int) -> float:
    relevant = {name for name, grade in grades.items() if grade > 0}
    return len(relevant & set(ranking[:depth])) / len(relevant) if relevant else 0.0


DEFINITIONS = {
    "ndcg@10": lambda grades, ranking: ndcg(grades, ranking, 10),
    "mrr@10": lambda grades, ranking: mrr(grades, ranking, 10),
    "recall@100": lambda grades, ranking: recall(grades, ranking, 100),
    "recall@1000": lambda grades, ranking: recall(grades, ranking, 1000),
}


def random_case(seed: int) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, float]]]:
    """Grades 0 to 3, ties, short and missing rankings, relevant documents outside the run's
    collection, retrieved queries that nobody judged."""
    rng = random.Random(seed)
    documents = [f"d{row}" for row in range(1500)]
    qrels = {
        f"q{row}": {
            name: rng.randint(0, 3)
            for name in [*rng.sample(documents[:200], rng.randint(1, 30)), f"unseen{row}"]
        }
        for row in range(40)
    }
    scores = {
        f"q{row}": {
            name: float(rng.randint(1, 20))
            for name in rng.sample(documents, rng.choice([0, 1, 5, 40, 300, 1200]))
        }
        for row in range(45)
        if row % 7
    }
    return qrels, scores


@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_their_definitions(seed):
    qrels, scores = random_case(seed)
    by_query = evaluate_queries(qrels, Run.from_scores(scores))
    means = evaluate_run(qrels, Run.from_scores(scores))
    assert set(by_query) == set(METRICS) == set(DEFINITIONS)
    for metric, definition in DEFINITIONS.items():
        expected = {}
        for query, grades in qrels.items():
            found = scores.get(query, {})
            ranking = sorted(found, key=lambda name, found=found: -found[name])
            expected[query] = definition(grades, ranking)
        assert by_query[metric] == pytest.approx(expected, abs=1e-12)
        assert means[metric] == pytest.approx(np.mean(list(expected.values())), abs=1e-12)
        assert 0 < means[metric] < 1


def test_ndcg_keeps_grades_and_gains_linearly():
    qrels = {"q": {"a": 3, "b": 1, "c": 2}}
    run = Run.from_scores({"q": {"b": 3.0, "c": 2.0, "a": 1.0}})
    found = evaluate_run(qrels, run, ["ndcg@10"])["ndcg@10"]
    assert found == pytest.approx(ndcg(qrels["q"], ["b", "c", "a"], 10), abs=1e-12)
    exponential = ndcg(qrels["q"], ["b", "c", "a"], 10, gain=lambda grade: 2.0**grade - 1)
    binary = ndcg(dict.fromkeys("abc", 1), ["b", "c", "a"], 10)
    assert abs(found - exponential) > 0.01
    assert abs(found - binary) > 0.01


def test_equal_scores_keep_the_order_of_the_run():
    qrels = {"q": {"b": 1}}
    first = Run.from_scores({"q": {"b": 1.0, "a": 1.0}})
    second = Run.from_scores({"q": {"a": 1.0, "b": 1.0}})
    assert evaluate_run(qrels, first, ["mrr@10"]) == {"mrr@10": 1.0}
    assert evaluate_run(qrels, second, ["mrr@10"]) == {"mrr@10": 0.5}


def test_queries_without_results_count_as_zero():
    qrels = {"found": {"a": 1}, "empty": {"a": 1}, "missing": {"a": 1}, "irrelevant": {"a": 0}}
    run = Run.from_scores({"found": {"a": 1.0}, "empty": {}, "irrelevant": {"a": 1.0}, "x": {}})
    assert evaluate_run(qrels, run) == dict.fromkeys(METRICS, 0.25)
    nothing = Run.from_scores({})
    assert evaluate_run(qrels, nothing) == dict.fromkeys(METRICS, 0.0)


def test_no_judgments_is_an_error():
    with pytest.raises(ValueError, match="no query has a judgment"):
        evaluate_run({}, Run.from_scores({"q": {"a": 1.0}}))


def test_a_document_that_is_ranked_twice_is_an_error():
    rows = np.array([[1, 0, -1, -1], [1, 2, 1, -1]])
    run = Run(["a", "b"], ["d0", "d1", "d2"], rows, np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="the run ranks document 'd1' twice for query 'b'"):
        evaluate_run({"a": {"d1": 1}}, run)


@pytest.mark.parametrize("metric", ["accuracy@10", "ndcg@0", "n", "NDCG@10"])
def test_unknown_metric_is_an_error(metric):
    with pytest.raises(ValueError, match=f"{metric} is no metric: choose from"):
        evaluate_run({"q": {"a": 1}}, Run.from_scores({"q": {"a": 1.0}}), [metric])


def test_the_known_metrics_are_those_of_ranx():
    from ranx.metrics import metric_switch

    taken = re.findall(r'metric == "([^"]+)"', inspect.getsource(metric_switch))
    assert {*NAMES, "rbp", "bpref"} == set(taken)


@pytest.mark.parametrize("metric", ["precision", "f1-l2", "bpref"])
def test_metrics_that_would_read_what_fills_the_arrays_are_refused(metric):
    with pytest.raises(ValueError, match=rf"{metric} (needs a number|is no metric)"):
        metric_depth(metric)


@pytest.mark.parametrize(
    ("metric", "depth", "parameters"),
    [
        ("ndcg@10", 10, ("ndcg", 10, 1)),
        ("map", None, ("map", 0, 1)),
        ("r-precision", None, ("r-precision", 0, 1)),
        ("recall@100-l2", 100, ("recall", 100, 2)),
    ],
)
def test_names_are_read_as_ranx_reads_them(metric, depth, parameters):
    from ranx.meta.evaluate import extract_metric_and_params

    assert metric_depth(metric) == depth
    assert extract_metric_and_params(metric) == parameters


@pytest.mark.parametrize(
    "metric",
    [
        "ndgc@10",
        "NDCG@10",
        "ndcg@",
        "ndcg@ten",
        "ndcg@0",
        "ndcg@-1",
        "ndcg10",
        "rbp.95",
        "recall-l",
        "recall@10-l0",
        "",
    ],
)
def test_a_misspelt_metric_has_no_depth(metric):
    with pytest.raises(ValueError, match=r"is no metric: choose from hits, .*ndcg, .*"):
        metric_depth(metric)
