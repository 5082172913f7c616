"""The protocol of small-BEIR on miniatures in BEIR's own layout, from a training to its test and to
``evaluate.py``: zip files, lengths of each task, own ids, dev apart."""

import json
import runpy
import sys
from functools import cache
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from sparton.datasets import quickstart
from sparton.retrieval.trec import read_run
from tests.test_train import run_here

ROOT = Path(__file__).resolve().parents[1]
TASKS = ["arguana", "fiqa", "nfcorpus", "scidocs", "scifact"]
SETTINGS = ["evaluation=small_beir", "evaluation.source=folders", "evaluation.dev.names=[msmarco]"]
POSITIONS = 160


@cache
def some_texts() -> list[str]:
    return quickstart.corpus_texts()[:40]


def write_zip(archive: Path, long_queries: bool) -> None:
    """40 documents with titles and ten queries; some, or all, have the ids of documents."""
    texts = some_texts()
    queries = {f"d{row}": texts[row] for row in range(10)}
    if long_queries:
        queries = {f"d{row}": " ".join(texts[row : row + 6]) for row in range(10)}
    corpus = [
        {"_id": f"d{row}", "title": text.split()[0], "text": text, "metadata": {}}
        for row, text in enumerate(texts)
    ]
    asked = [{"_id": name, "text": text, "metadata": {}} for name, text in queries.items()]
    judged = [
        f"d{row}\td{row + offset}\t{2 - offset % 2}" for row in range(10) for offset in (3, 5)
    ]
    archive.parent.mkdir(parents=True, exist_ok=True)
    with ZipFile(archive, "w", ZIP_DEFLATED) as content:
        for name, lines in (
            ("corpus.jsonl", map(json.dumps, corpus)),
            ("queries.jsonl", map(json.dumps, asked)),
            ("qrels/test.tsv", ["query-id\tcorpus-id\tscore", *judged]),
        ):
            content.writestr(f"{archive.stem}/{name}", "\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the zip files in ``data``, and a run that chose its model and was tested by
    them."""
    folder = tmp_path_factory.mktemp("small_beir")
    for name in TASKS:
        write_zip(folder / f"data/{name}.zip", long_queries=name == "arguana")
    write_zip(folder / "data/nano-beir/msmarco.zip", long_queries=False)
    backbone = [f"backbone.max_length={POSITIONS}", "query_length=24", "document_length=64"]
    run_here(folder / "run", *SETTINGS, *backbone, f"data_dir={folder / 'data'}")
    return folder


def evaluated(trained: Path, monkeypatch: pytest.MonkeyPatch, name: str, *overrides: str) -> Path:
    """The folder of what ``evaluate.py`` wrote."""
    command = ["evaluate.py", "device=cpu", f"model={trained / 'run/model'}", *SETTINGS]
    command += [f"data_dir={trained / 'data'}", f"output={trained / name}", *overrides]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    return trained / name


def found(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Task to query id to document id to score."""
    runs = {path.stem: read_run(path) for path in (folder / "runs").glob("*.trec")}
    return {
        name: {query: dict(hits) for query, hits in run.rankings()} for name, run in runs.items()
    }


@pytest.mark.slow
def test_a_training_and_evaluate_follow_one_protocol(trained, monkeypatch, capsys):
    own = found(trained / "run")
    again = found(evaluated(trained, monkeypatch, "again"))
    for name in TASKS:
        assert own[name].keys() == again[name].keys() and len(own[name]) == 10
        for query, hits in again[name].items():
            assert query not in hits, "a query's own id is left out on every task"
            assert hits == pytest.approx(own[name][query], rel=1e-4)
    said = capsys.readouterr().out
    assert f"arguana: the task keeps 512 tokens of a query, the model has {POSITIONS}" in said
    assert "docs/s" in said and "ms/query p50/p95/p99" in said and "index MB" in said
    card = (trained / "run/model/README.md").read_text()
    assert "| documents/s | ms a query, p50 / p95 / p99 | index MB |" in card
    results = json.loads((trained / "run/results.json").read_text())
    assert [task["name"] for task in results["tasks"]] == TASKS
    for task in results["tasks"]:
        latency = task["speed"]["latency"]
        assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"] and latency["queries"] == 10
        assert task["speed"]["documents_per_second"] > 0 < task["speed"]["index_bytes"]


def test_lengths_that_a_user_gives_go_before_those_of_a_task(trained, monkeypatch):
    usual = found(trained / "run")
    two = "evaluation.test.names=[arguana,fiqa]"
    shorter = found(evaluated(trained, monkeypatch, "shorter", two, "query_length=24"))
    assert shorter["arguana"] != usual["arguana"], "its queries are longer than 24 tokens"
    assert shorter["fiqa"].keys() == usual["fiqa"].keys()
    for query, hits in shorter["fiqa"].items():
        assert hits == pytest.approx(usual["fiqa"][query], rel=1e-4)
    rule = "evaluation.test.collections.arguana.query_length=24"
    ruled = found(evaluated(trained, monkeypatch, "ruled", two, rule))
    assert ruled == shorter
