"""Results on the disk: what is wrong in them is told with its place."""

import json
from pathlib import Path

import pytest

from sparton.evaluation.results import read_queries, read_results

SPEED = {
    "documents_per_second": 10.0,
    "queries_per_second": 3,
    "index_bytes": 4,
    "latency": {"p50": 1.0, "p95": 2.0, "p99": 3.0, "queries": 3},
}
TASK = {"name": "a", "metrics": {"ndcg@10": 0.5}, "speed": SPEED, "by_query": "runs/a.json"}
QUERIES = {"queries": ["q1", "q2"], "metrics": {"ndcg@10": [0.25, 0.75]}}


def write(folder: Path, task: object = TASK, queries: object = QUERIES) -> Path:
    (folder / "runs").mkdir()
    (folder / "runs/a.json").write_text(json.dumps(queries))
    (folder / "results.json").write_text(json.dumps({"tasks": [task]}))
    return folder


def test_what_is_right_is_read(tmp_path):
    write(tmp_path)
    assert read_results(tmp_path / "results.json").tasks == [TASK]
    assert read_queries(tmp_path) == {"a": {"ndcg@10": {"q1": 0.25, "q2": 0.75}}}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (3, "task 0 must hold a JSON object, not 3"),
        (TASK | {"name": 3}, "task 0: name is 3, and must be a string"),
        ({"name": "a"}, "task 0: metrics must hold a JSON object, not None"),
        (TASK | {"metrics": ["a"]}, r"task 0: metrics must hold a JSON object, not \['a'\]"),
        (TASK | {"metrics": {"a": "b"}}, "task 0: metrics: a is 'b', and must be a number"),
        (TASK | {"metrics": {"a": True}}, "metrics: a is True, and must be a number"),
        (TASK | {"metrics": {"a": 10**400}}, "metrics: a is 1000.*, and must be a number"),
        (TASK | {"metrics": {"a": float("nan")}}, "is not valid JSON .NaN is no finite number"),
        (TASK | {"speed": SPEED | {"index_bytes": "b"}}, "speed: index_bytes is 'b', and must be"),
        (TASK | {"speed": SPEED | {"latency": {}}}, "speed: latency: p50 is not there"),
        (TASK | {"exact_recall": {"at_10": "b"}}, "exact_recall: at_10 is 'b', and must be a numb"),
        (TASK | {"by_query": 3}, "task 0: by_query is 3, and must be a string"),
    ],
)
def test_damaged_results_are_refused(tmp_path, task, message):
    file = write(tmp_path, task) / "results.json"
    for read in (lambda: read_results(file), lambda: read_queries(tmp_path)):
        with pytest.raises(ValueError, match=rf"results\.json.*{message}"):
            read()


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ([], "must hold a JSON object"),
        (QUERIES | {"queries": [1, 2]}, r"queries is \[1, 2\], and must be a list of strings"),
        (QUERIES | {"queries": ["q1"]}, r"ndcg@10 is .* a list of 1 numbers, one for each query"),
        (QUERIES | {"metrics": {"a": ["b", "c"]}}, "metrics: a is .* must be a list of numbers"),
        (QUERIES | {"metrics": {"a": 3}}, "metrics: a is 3, and must be a list"),
        ({"queries": ["q1"]}, "metrics must hold a JSON object, not None"),
    ],
)
def test_damaged_figures_of_queries_are_refused(tmp_path, queries, message):
    with pytest.raises(ValueError, match=rf"runs/a\.json.*{message}"):
        read_queries(write(tmp_path, queries=queries))
