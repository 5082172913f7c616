"""The benchmark of encoding: both libraries give the same representations, and wrong ones show."""

import json

import pytest
import torch

from benchmarks.command import main
from benchmarks.encoding import study
from benchmarks.encoding.models import as_rows, ours, theirs, write_model
from benchmarks.encoding.study import ALONE, OURS, STUDY, THEIRS, TOKENS, Cell
from benchmarks.study import Settings
from benchmarks.texts import documents

pytest.importorskip("sentence_transformers", minversion="6.0")
TEXTS = [documents()[row] for row in range(6)]


def settings(folder: object) -> Settings:
    options = {"texts": 6, "threads": 0, "sizes": [], "kinds": [], "batches": []}
    return Settings("cpu", 0.01, str(folder), True, options)


@pytest.mark.parametrize("kind", ["splade", "colbert", "dense"])
def test_both_libraries_encode_alike(kind, tmp_path):
    path = write_model(tmp_path, kind, "tiny")
    found = as_rows(ours(path, "cpu", "fp32")(TEXTS))
    expected = as_rows(theirs(path, kind, "cpu", 2, "fp32")(TEXTS))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert not torch.allclose(found.roll(1, 0), expected, rtol=0, atol=1e-3)


def test_both_libraries_have_the_same_texts(tmp_path, monkeypatch):
    """Fewer of them would have more padding, and be encoded more slowly."""
    seen = []
    found = type("Found", (), {"extent": type("Extent", (), {"entries": 1, "texts": 1})})()
    monkeypatch.setattr(study, "ours", lambda *_: lambda texts: seen.append(len(texts)) or found)
    monkeypatch.setattr(study, "theirs", lambda *_: lambda texts: seen.append(len(texts)))
    monkeypatch.setattr(study, "as_rows", lambda _: torch.ones(2, 2))
    monkeypatch.setattr(study, "_rate", lambda run, *_: float(run()))
    measure = STUDY.prepare([Cell("splade", "tiny", OURS)], settings(tmp_path))
    rates = [measure(Cell("splade", "tiny", each))["texts_per_s"] for each in (OURS, THEIRS)]
    assert rates == [64.0, 64.0] and seen[-2:] == [64, 64]


def test_the_share_is_of_the_lower_floor_that_was_measured_before():
    """Also where a run goes on, and nowhere else."""
    cell = Cell("splade", "tiny", THEIRS, 32)
    alone, tokens, other = (
        (Cell(kind, "tiny", library), {"status": "ok", "texts_per_s": rate})
        for kind, library, rate in (
            ("splade", ALONE, 100.0),
            ("splade", TOKENS, 1000.0),
            ("colbert", ALONE, 10.0),
        )
    )
    record = {"status": "ok", "texts_per_s": 90.0}
    assert STUDY.beside(cell, record, [alone, other, tokens]) == {"share": 0.9}
    failed = alone[0], {"status": "failed"}
    for earlier in ([tokens], [alone, other], [failed, tokens], []):
        assert STUDY.beside(cell, record, earlier) == {}
    assert STUDY.beside(*alone, [alone, tokens]) == {}


def test_a_run_goes_on_with_the_same_texts_and_threads():
    def context(texts: int, threads: int, miniature: bool = False) -> dict:
        options = {"texts": texts, "threads": threads}
        return STUDY.context(STUDY.name, Settings("cpu", 1.0, "", miniature, options))

    assert context(16, 3) == {"texts": 16, "threads": 3}
    assert context(16, 0)["threads"] == torch.get_num_threads()
    assert context(16, 3, miniature=True)["texts"] == 64


@pytest.mark.slow
def test_what_encodes_otherwise_gets_no_rate(tmp_path, monkeypatch):
    cell = Cell("splade", "tiny", OURS)
    monkeypatch.setattr(study, "CHECKED", 4)
    assert STUDY.prepare([cell], settings(tmp_path))(cell)["status"] == "ok"
    monkeypatch.setattr(
        study, "ours", lambda *arguments: lambda texts: ours(*arguments)(texts[::-1])
    )
    record = STUDY.prepare([cell], settings(tmp_path))(cell)
    assert record["status"] == "red_gate" and "texts_per_s" not in record


@pytest.mark.slow
def test_the_command_writes_a_record_for_every_cell(tmp_path):
    output = tmp_path / "encoding.jsonl"
    words = ["encoding", "--miniature", "--device", "cpu", "--seconds", "0.1", "--batches", "32"]
    main([*words, "--output", str(output), "--folder", str(tmp_path / "models")])
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["status"] for record in records] == ["ok"] * 12
    assert all(record["texts_per_s"] > 0 for record in records)
