"""The benchmark of encode.py and evaluate.py: rates are of the texts, and other results show."""

import json
from pathlib import Path

import pytest

from benchmarks.command import main
from benchmarks.encoding import collections
from benchmarks.encoding.collections import ENCODE, EVALUATE, STUDY, Cell, Run
from benchmarks.study import Settings

SECONDS = {"few": 12.0, "all": 21.0, "judged": 17.0}


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Measures a cell by what a stand-in for its command leaves."""
    monkeypatch.setattr(collections, "write_model", lambda folder, *_: folder / "model")
    monkeypatch.setattr(collections, "MINIATURE", 1000)
    left = {"text": "same"}

    def run(script, cell, root, model, settings, name, *words) -> Run:
        output = root / f"{cell.label}-{name}"
        output.mkdir()
        seconds = {"documents": 5.0, "queries": 1.0}
        tasks = {"tasks": [{"seconds": seconds, "metrics": {"ndcg@10": left["text"]}}]}
        (output / "results.json").write_text(json.dumps(tasks))
        (output / "part").write_text(left["text"])
        return Run(output, SECONDS[name] / cell.gpus)

    monkeypatch.setattr(collections, "run", run)
    settings = Settings("cpu", 0.0, str(tmp_path), True, {})
    return left, lambda verb: STUDY.prepare([Cell(verb, "splade", 1)], settings)


def test_start_up_is_no_part_of_the_rate(prepared):
    _, prepare = prepared
    measure = prepare(ENCODE)
    one, two = (measure(Cell(ENCODE, "splade", gpus)) for gpus in (1, 2))
    assert one["status"] == two["status"] == "ok"
    assert (one["texts_per_s"], two["texts_per_s"]) == (990 / 9, 2 * 990 / 9)
    assert one["start_s"] == pytest.approx(12 - 10 * 9 / 990, abs=0.01)
    record = prepare(EVALUATE)(Cell(EVALUATE, "splade", 1))
    assert (record["texts_per_s"], record["start_s"], record["seconds"]) == (100.0, 11.0, 6.0)


@pytest.mark.parametrize("verb", [ENCODE, EVALUATE])
def test_other_results_on_more_gpus_have_no_rate(prepared, verb):
    left, prepare = prepared
    measure = prepare(verb)
    assert measure(Cell(verb, "splade", 1))["status"] == "ok"
    left["text"] = "other"
    assert measure(Cell(verb, "splade", 2)) == {"status": "red_gate"}


@pytest.mark.slow
def test_the_commands_are_run(tmp_path):
    output = tmp_path / "collections.jsonl"
    words = ["collections", "--miniature", "--device", "cpu", "--kinds", "splade", "--gpus", "1"]
    main([*words, "--output", str(output), "--folder", str(tmp_path / "left")])
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(record["verb"], record["status"]) for record in records] == [
        (ENCODE, "ok"),
        (EVALUATE, "ok"),
    ]
    assert all(record["texts_per_s"] > 0 for record in records)
    assert not list(Path(tmp_path / "left").glob("encode-*"))
