"""The benchmark of encoding: both libraries give the same representations, and wrong ones show."""

import json

import pytest
import torch

from benchmarks.command import main
from benchmarks.encoding import study
from benchmarks.encoding.models import as_rows, ours, theirs, write_model
from benchmarks.encoding.study import OURS, STUDY, Cell
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
