"""``sparton compare`` on what evaluations leave in their folders."""

import json
from pathlib import Path

import pytest

from sparton.cli.commands.compare import main, results_folder, run_names
from sparton.evaluation import evaluate_bm25, write_results, write_task_run
from sparton.evaluation.results import read_queries
from tests.evaluation.problems import make_task

QUERIES = [f"query-{number}" for number in range(20)]


def make_run(folder: Path, values: list[float], tasks: tuple[str, ...] = ("scifact",)) -> Path:
    (folder / "runs").mkdir(parents=True)
    entries = []
    for name in tasks:
        file = f"runs/{name}.metrics.json"
        (folder / file).write_text(
            json.dumps({"queries": QUERIES, "metrics": {"ndcg@10": values, "mrr@10": values}})
        )
        entries.append({"name": name, "metrics": {}, "by_query": file})
    (folder / "results.json").write_text(json.dumps({"tasks": entries}))
    return folder


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    base = [0.05 * number for number in range(20)]
    better = [min(value + 0.1, 1.0) for value in base]
    better[3], better[7] = 0.0, 1.0
    return [
        make_run(tmp_path / "bm25" / "seed-0", base, ("scifact", "other")),
        make_run(tmp_path / "splade" / "seed-0", better),
    ]


def test_a_table_says_what_differs_and_by_what_chance(runs, capsys):
    main([str(run) for run in runs])
    said = capsys.readouterr().out
    assert "ndcg@10: splade against bm25" in said and "other" not in said
    row = next(line.split() for line in said.splitlines() if line.lstrip().startswith("scifact "))
    assert row[1:5] == ["20", "0.4750", "0.5875", "+0.1125"]
    assert row[-1] == "19/0/1" and 0 < float(row[-2]) < 0.02
    assert "scifact, largest gains: query-7 (0.350 to 1.000), query-0 (0.000 to 0.100)" in said
    assert "scifact, largest losses: query-3 (0.150 to 0.000)" in said
    assert "Holm's correction for 1 test." in said
    main([*(str(run) for run in runs), "--metric", "mrr@10", "--queries", "0"])
    said = capsys.readouterr().out
    assert "mrr@10: splade" in said and "largest" not in said


def test_a_run_may_be_named_by_its_model(runs, capsys):
    for run in runs:
        (run / "model").mkdir()
    assert results_folder(runs[0] / "model") == runs[0]
    assert results_folder(runs[0]) == runs[0]
    main([str(run / "model") for run in runs])
    assert "splade against bm25" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"{runs[0]} is there twice"):
        main([str(runs[0]), str(runs[0] / "model")])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/x/a/seed-0", "runs/x/b/seed-0"], ["a", "b"]),
        (["runs/x", "runs/x/b"], ["x", "x/b"]),
        (["a/s/0", "a/s/1", "b/s/0"], ["a/s/0", "a/s/1", "b/s/0"]),
    ],
)
def test_runs_are_called_by_what_sets_them_apart(paths, names):
    assert run_names([Path(path) for path in paths]) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one"], "there is nothing to compare one with: name two runs"),
        (["one", "one"], "one is there twice"),
        (["one", "two", "--queries", "-1"], "--queries=-1: must not be negative"),
        (["bm25/seed-0", "splade/seed-0", "--task", "other"], "splade has no task other: it has s"),
    ],
)
def test_what_cannot_be_compared_is_said(runs, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        main(arguments)


def test_runs_without_results_or_without_their_queries(runs, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none/results\.json: no such file; trainings and"):
        main([str(runs[0]), str(tmp_path / "none")])
    (runs[1] / "runs/scifact.metrics.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no figures of the queries of scifact: evaluate"):
        main([str(run) for run in runs])
    (runs[1] / "results.json").write_text('{"tasks": 3}')
    with pytest.raises(ValueError, match=r"results\.json: tasks is 3, and must be a list"):
        main([str(run) for run in runs])


def test_an_evaluation_leaves_what_every_query_came_to(tmp_path):
    result = evaluate_bm25(make_task("a/b"), metrics=["ndcg@10", "recall@2"])
    write_results([result], tmp_path, {})
    write_task_run(result, tmp_path)
    found = read_queries(tmp_path)
    assert found == {"a/b": result.by_query}
    for metric, values in found["a/b"].items():
        assert sum(values.values()) / len(values) == pytest.approx(result.metrics[metric])
    assert set(found["a/b"]["ndcg@10"]) == set(make_task().qrels)
    (task,) = json.loads((tmp_path / "results.json").read_text())["tasks"]
    assert task["by_query"] == "runs/a-b.metrics.json"
