"""Every metric on offer against trec_eval (through pytrec_eval), on random judgments and runs.

Problems are drawn by Hypothesis: graded, unjudged and negatively judged documents, judged documents
outside the collection, equal scores, queries with unequal numbers of judgments or with none,
rankings that are short, empty or missing.
"""

import math

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given, settings
from hypothesis import strategies as st

from sparton.retrieval import metrics
from sparton.retrieval.metrics import NAMES, evaluate_queries
from sparton.retrieval.run import Run

DOCUMENTS = [f"d{row}" for row in range(12)]
OUTSIDE = [f"outside{row}" for row in range(3)]
DEPTHS = (1, 3, 10, 100)
WITHOUT_DEPTH = tuple(name for name in NAMES if name not in metrics.CUT)
OFFERED = [
    *WITHOUT_DEPTH,
    *(f"{name}@{depth}" for name in NAMES for depth in DEPTHS),
    *(f"{name}@10-l2" for name in NAMES),
]

Grades = dict[str, int]
Qrels = dict[str, Grades]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Qrels, Run]:
    """Judgments and a run over a collection of twelve documents, whose first is often relevant."""
    queries = [f"q{row}" for row in range(draw(st.integers(1, 5)))]
    grades = st.dictionaries(
        st.sampled_from(DOCUMENTS + OUTSIDE), st.integers(-2, 4), max_size=len(DOCUMENTS)
    )
    qrels = {name: draw(grades) for name in queries}
    depth = draw(st.integers(0, len(DOCUMENTS)))
    answered = draw(st.lists(st.sampled_from([*queries, "unjudged"]), unique=True))
    rows = np.full((len(answered), depth), -1, np.int64)
    scores = np.zeros((len(answered), depth), np.float32)
    for place in range(len(answered)):
        found = draw(st.permutations(range(len(DOCUMENTS))))[: draw(st.integers(0, depth))]
        rows[place, : len(found)] = found
        ties = draw(st.lists(st.integers(0, 3), min_size=len(found), max_size=len(found)))
        scores[place, : len(found)] = sorted(ties, reverse=True)
    return qrels, Run(answered, DOCUMENTS, rows, scores)


def dcg(grades: list[float]) -> float:
    return sum(grade / math.log2(rank + 2) for rank, grade in enumerate(grades))


def expected(qrels: Qrels, run: Run, metric: str) -> dict[str, float]:
    """By trec_eval; DCG without its division, which trec_eval lacks, from trec_eval's NDCG."""
    name, _, level = metric.partition("-l") if "-l" in metric else (metric, "", "1")
    name, _, depth = name.partition("@")
    rankings = {query: [name for name, _ in found] for query, found in run.rankings()}
    values = {}
    for query, grades in qrels.items():
        ranking = rankings.get(query, [])
        values[query] = one_query(name, int(depth or 0), int(level), grades, ranking)
    return values


def one_query(name: str, depth: int, level: int, grades: Grades, ranking: list[str]) -> float:
    # trec_eval's NDCG knows no level; a grade below it is to gain nothing here.
    grades = {document: grade if grade >= level else 0 for document, grade in grades.items()}
    if name.endswith("_burges"):
        grades = {document: 2**grade - 1 for document, grade in grades.items()}
    kept = ranking[:depth] if depth and name != "r-precision" else ranking
    num_relevant = sum(grade > 0 for grade in grades.values())
    if not kept or not num_relevant:
        return 0.0
    # Scores that fall with the rank, so that trec_eval keeps the order among equal ones.
    scored = {document: float(-rank) for rank, document in enumerate(kept)}
    measure = {
        "mrr": "recip_rank", "map": "map", "r-precision": "Rprec", "hits": "num_rel_ret",
        "hit_rate": "num_rel_ret", "precision": "num_rel_ret", "recall": "num_rel_ret",
        "f1": "num_rel_ret",
    }.get(name, f"ndcg_cut.{depth}" if depth else "ndcg")  # fmt: skip
    evaluator = pytrec_eval.RelevanceEvaluator({"q": grades}, {measure})
    (value,) = evaluator.evaluate({"q": scored})["q"].values()
    if name.startswith("dcg"):
        ideal = sorted((max(grade, 0) for grade in grades.values()), reverse=True)
        return value * dcg(ideal[:depth] if depth else ideal)
    return {
        "hit_rate": float(value > 0),
        "precision": value / (depth or 1),
        "recall": value / num_relevant,
        "f1": 2 * value / ((depth or 1) + num_relevant),
    }.get(name, value)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_every_metric_equals_trec_eval(problem):
    compare(*problem)


def compare(qrels: Qrels, run: Run) -> None:
    found = evaluate_queries(qrels, run, OFFERED)
    for metric in OFFERED:
        assert found[metric] == pytest.approx(expected(qrels, run, metric), abs=1e-9), metric


def by_trec_eval(qrels: Qrels, run: Run) -> dict[str, float]:
    """NDCG@10 of answered queries that have something relevant, by trec_eval's own order."""
    relevant = {query: own for query, own in qrels.items() if max(own.values(), default=0) > 0}
    results = {query: dict(found) for query, found in run.rankings() if found}
    found = pytrec_eval.RelevanceEvaluator(relevant, {"ndcg_cut.10"}).evaluate(results)
    return {query: values["ndcg_cut_10"] for query, values in found.items()}


def by_us(qrels: Qrels, run: Run, queries: dict[str, float]) -> dict[str, float]:
    values = evaluate_queries(qrels, run, ["ndcg@10"])["ndcg@10"]
    return {query: values[query] for query in queries}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_equal_scores_come_in_the_order_of_trec_eval(problem):
    qrels, run = problem
    theirs, ordered = by_trec_eval(qrels, run), run.ties_by_id()
    assert by_us(qrels, ordered, theirs) == pytest.approx(theirs, abs=1e-9)
    for (query, before), (other, after) in zip(run.rankings(), ordered.rankings(), strict=True):
        assert query == other and dict(before) == dict(after) and len(before) == len(after)
        assert [score for _, score in before] == [score for _, score in after]


def test_the_order_of_a_collection_is_another():
    rows, scores = np.array([[0, 1, 2]]), np.ones((1, 3), np.float32)
    qrels, run = {"q": {"d0": 1}}, Run(["q"], DOCUMENTS, rows, scores)
    theirs = by_trec_eval(qrels, run)
    assert by_us(qrels, run, theirs) == {"q": 1.0} and theirs["q"] == pytest.approx(0.5)


def first_document_is_relevant() -> tuple[Qrels, Run]:
    """A query with one judgment, of the collection's first document, beside one with two."""
    rows = np.array([[0, 1, 2], [1, 2, 0]])
    scores = np.array([[3, 2, 1], [3, 2, 1]], np.float32)
    return {"a": {"d0": 1}, "b": {"d1": 1, "d2": 1}}, Run(["a", "b"], DOCUMENTS, rows, scores)


def test_the_first_document_of_a_collection_is_nothing_special():
    values = evaluate_queries(*first_document_is_relevant(), ["ndcg@10"])
    assert values == {"ndcg@10": {"a": 1.0, "b": 1.0}}


def test_the_comparison_notices_fillings_that_are_documents(monkeypatch):
    monkeypatch.setattr(metrics, "_NO_JUDGMENT", (0.0, 0.0))
    values = evaluate_queries(*first_document_is_relevant(), ["ndcg@10"])
    assert values["ndcg@10"]["a"] == pytest.approx(0.613, abs=1e-3)
    with pytest.raises(AssertionError):
        compare(*first_document_is_relevant())
