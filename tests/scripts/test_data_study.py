"""The benchmark of loading: files of every shape, and records that become a table."""

import json
import os

import pytest

from benchmarks.command import main
from benchmarks.data import study
from benchmarks.data.files import SHARES, open_files, tables_of, write_files
from benchmarks.data.study import STUDY, Cell
from benchmarks.study import Settings
from benchmarks.texts import build_tokenizer, documents, queries
from make_tables import TABLES
from tables import records


def test_texts_differ_and_are_as_long_as_they_claim():
    tokenizer = build_tokenizer()
    for texts, mean, longest in ((queries(), 35, 64), (documents(), 159, 256)):
        sample = [texts[number] for number in range(0, 20_000_000, 9_973)]
        assert len(set(sample)) == len(sample)
        encodings = tokenizer.backend_tokenizer.encode_batch(sample)
        lengths = [len(encoding.ids) for encoding in encodings]
        assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.03)
        assert max(lengths) <= longest
        words = sum(len(text.split()) for text in sample)
        assert sum(lengths) / words == pytest.approx(1.3, rel=0.1)
        assert not any(tokenizer.unk_token_id in encoding.ids for encoding in encodings)


def test_files_hold_the_examples_asked_for(tmp_path):
    size = write_files(tmp_path / "files", 200)
    assert size == sum(path.stat().st_size for path in (tmp_path / "files").iterdir())
    mixture = open_files(tmp_path / "files")
    assert len(mixture) == 200 and set(mixture.sources) == set(SHARES)
    for example in mixture.examples(range(50), seed=0, num_negatives=0):
        assert example.query and example.positive


def settings(folder: object) -> Settings:
    return Settings("cpu", 0.1, str(folder), True, {"batch": 16, "tokenizer": None})


def test_figures_of_preparation_are_those_of_this_code(tmp_path, monkeypatch):
    """Cells of as many examples share them; what other code has left is written anew."""
    codes, made = iter("aabb"), []

    def prepare(folder, cell):
        made.append(cell.workers)
        return {"prepare_s": float(len(made))}

    monkeypatch.setattr(study, "written_and_prepared", prepare)
    monkeypatch.setattr(study, "measure_loading", lambda *_: {"pairs_per_s": 1.0})
    monkeypatch.setattr(study, "code_digest", lambda: next(codes))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    left = tmp_path / "examples-500.json"
    left.write_text(json.dumps({"prepare_s": 999.0}))  # as code of before left it
    found = [STUDY.measure(Cell(500, n), settings(tmp_path)) for n in (1, 2, 3, 4)]
    assert [record["prepare_s"] for record in found] == [1.0, 1.0, 2.0, 2.0]
    assert made == [1, 3] and not {"code", "figures"} & found[0].keys()


def test_files_written_anew_have_no_tables_of_before(tmp_path):
    for size in (200, 400):
        write_files(tmp_path / "files", size)
        assert not tables_of(tmp_path / "files").exists()
        assert len(open_files(tmp_path / "files")) == size


def test_more_workers_than_cores_are_absent(tmp_path, monkeypatch):
    """The loader would start fewer than the cell says."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(study, "written_and_prepared", lambda *_: {})
    monkeypatch.setattr(study, "measure_loading", lambda *_: {})
    found = [STUDY.measure(Cell(500, n), settings(tmp_path)) for n in (2, 4)]
    assert found == [{"status": "ok"}, {"status": "absent", "error": "2 cores are here"}]


@pytest.mark.slow
def test_records_become_a_table(tmp_path, monkeypatch):
    output = tmp_path / "test-cpu/data.jsonl"
    words = ["data", "--miniature", "--workers", "1", "--seconds", "0.5", "--batch", "16"]
    paths = ["--folder", str(tmp_path / "files"), "--output", str(output)]
    main([*words, "--device", "cpu", *paths])
    (record,) = map(json.loads, output.read_text().splitlines())
    assert record["examples"] == 500 and record["workers"] == 1
    assert record["prepare_s"] > 0 and record["file_bytes"] > 0
    assert record["pairs_per_s"] > 0 and record["workers_bytes"] > record["grown_bytes"]
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert "| 500 | 1 |" in TABLES["data"]()
