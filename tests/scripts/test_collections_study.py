"""The benchmark of encode.py and evaluate.py: rates are of the texts, and other results show."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch

from benchmarks import records
from benchmarks.command import main
from benchmarks.encoding import collections
from benchmarks.encoding.collections import ENCODE, EVALUATE, STUDY, Cell, Run, words_of
from benchmarks.study import Settings
from sparton.cli.command_line import read_request
from sparton.cli.composing import composer
from sparton.cli.devices import check_gpus
from tables import encoding as tables

SECONDS = 21.0


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Measures a cell by what a stand-in for its command leaves."""
    monkeypatch.setattr(collections, "write_model", lambda folder, *_: folder / "model")
    monkeypatch.setattr(collections, "MINIATURE", 1000)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    left = {"text": "same"}

    def run(cell, root, model, settings, name) -> Run:
        output = root / f"{cell.label}-{name}"
        output.mkdir(exist_ok=True)
        seconds = {"documents": 5.0, "queries": 1.0}
        tasks = {"tasks": [{"seconds": seconds, "metrics": {"ndcg@10": left["text"]}}]}
        (output / "results.json").write_text(json.dumps(tasks))
        (output / "part").write_text(left["text"])
        ran.append((cell.gpus, name))
        return Run(output, SECONDS)

    monkeypatch.setattr(collections, "run", run)
    monkeypatch.setattr(collections, "steady_rate", lambda _, processes, __: 100.0 * processes)
    ran: list[tuple[int, str]] = []
    settings = Settings("cpu", 0.0, str(tmp_path), True, {})
    return left, ran, lambda verb: STUDY.prepare([Cell(verb, "splade", 1)], settings)


def test_start_up_is_no_part_of_the_rate(prepared):
    _, _, prepare = prepared
    measure = prepare(ENCODE)
    one, two = (measure(Cell(ENCODE, "splade", gpus)) for gpus in (1, 2))
    assert one["status"] == two["status"] == "ok"
    assert (one["texts_per_s"], two["texts_per_s"]) == (100, 200)
    assert (one["start_s"], two["start_s"]) == (SECONDS - 10, SECONDS - 5)
    record = prepare(EVALUATE)(Cell(EVALUATE, "splade", 1))
    assert (record["texts_per_s"], record["start_s"]) == (100.0, SECONDS - 6)


@pytest.mark.parametrize(("processes", "rate"), [(1, 60 / 8), (2, 50 / 6)])
def test_the_rate_begins_when_every_process_has_written(processes, rate, tmp_path, monkeypatch):
    """Shards of ten texts, of which each process has written its first after two seconds more."""
    shards = [SimpleNamespace(rows=range(10), name=f"{number}") for number in range(7)]
    facts = SimpleNamespace(shards=lambda: shards)
    monkeypatch.setattr(collections, "read_facts", lambda folder: facts)
    monkeypatch.setattr(collections, "shard_path", lambda folder, shard: folder / shard.name)
    for shard, second in zip(shards, (2, 0, 4, 5, 6, 7, 8), strict=True):
        (tmp_path / shard.name).touch()
        os.utime(tmp_path / shard.name, (second, second))
    assert collections.steady_rate(tmp_path, processes, "--texts") == pytest.approx(rate)
    with pytest.raises(ValueError, match=r"7 shards of 7 processes have no rate.*raise --texts"):
        collections.steady_rate(tmp_path, 7, "--texts")


@pytest.mark.parametrize("verb", [ENCODE, EVALUATE])
def test_other_results_on_more_gpus_are_not_believed(prepared, verb):
    """A run that goes on does it in another process: the record of one GPU is what it has."""
    left, _, prepare = prepared
    one, two = (Cell(verb, "splade", gpus) for gpus in (1, 2))
    alone = json.loads(json.dumps(prepare(verb)(one)))
    same = prepare(verb)(two)
    left["text"] = "other"
    other = prepare(verb)(two)
    beside = [(one._replace(kind="colbert"), other), (one, alone)]
    assert STUDY.objection(one, alone, []) is None
    assert STUDY.objection(two, same, beside) is None
    assert f"is not that of {one.label}" in (STUDY.objection(two, other, beside) or "")
    for nothing in ([], beside[:1], [(one, {"status": "failed"})]):
        assert "--gpus 1 2 --fresh" in (STUDY.objection(two, same, nothing) or "")


def test_one_gpu_is_first():
    settings = Settings("cpu", 0.0, "", True, {"kinds": ["splade"], "gpus": [2, 1]})
    assert [cell.gpus for cell in STUDY.suites(settings)[STUDY.name]] == [1, 2, 1, 2]


@pytest.mark.parametrize("verb", [ENCODE, EVALUATE])
def test_a_run_goes_on(prepared, verb, tmp_path):
    """No figure of a cell has the name of a setting of the run."""
    cell = Cell(verb, "splade", 1)
    context = {"suite": STUDY.name, "git_sha": "a", "dirty": False, "seconds": 0.7, "seed": 0}
    written = {**context, **cell._asdict(), **prepared[2](verb)(cell)}
    records.write_records(tmp_path / "collections.jsonl", [written])
    records.resume(STUDY, tmp_path / "collections.jsonl", context, set())
    assert records.read_records(tmp_path / "collections.jsonl") == [written]


def test_other_numbers_of_texts_lie_in_folders_of_their_own(prepared, tmp_path):
    """A miniature leaves nothing that a full run would measure."""
    _, _, prepare = prepared
    prepare(ENCODE)
    for texts in (1500, 400):
        settings = Settings("cpu", 0.0, str(tmp_path), False, {"texts": texts})
        cell = Cell(ENCODE, "splade", 1)
        record = STUDY.prepare([cell], settings)(cell)
        assert STUDY.context(STUDY.name, settings) == {"texts": texts}
        assert record["start_s"] == SECONDS - texts / 100
        path = words_of(cell, tmp_path, tmp_path / "model", settings, "all")[1]
        folder = Path(path.removeprefix("data="))
        assert len((folder / "corpus.jsonl").read_text().splitlines()) == texts


def test_the_table_has_no_rate_that_is_not_believed():
    """Older records say how long all took under the name of a setting."""
    one = {**Cell(ENCODE, "splade", 1)._asdict(), "status": "ok", "texts_per_s": 100.0}
    lines = [one | {"seconds": 30.0, "start_s": 20.0}]
    lines.append(lines[0] | {"gpus": 2, "seconds": 0.7, "all_s": 25.0, "texts_per_s": 150.0})
    lines.append(lines[1] | {"gpus": 4, "status": "red_gate"})
    rows = tables.collections(lines).splitlines()[2:]
    assert rows[0].endswith("| 100 | 1.00 | 30.0 | 20.0 |")
    assert rows[1].endswith("| 150 | 1.50 | 25.0 | 20.0 |")
    assert rows[2].endswith("| red_gate |  |  |  |")


@pytest.mark.parametrize("verb", [ENCODE, EVALUATE])
def test_what_is_done_once_on_a_machine_is_done_before(prepared, verb):
    """Kernels are compiled and documents prepared."""
    _, ran, prepare = prepared
    prepare(verb)
    assert ran == [(1, "few")]
    assert list(Path(datasets.config.HF_DATASETS_CACHE).glob("sparton/*/table.arrow"))


@pytest.mark.parametrize("verb", [ENCODE, EVALUATE])
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_commands_take_their_arguments(verb, gpus, device, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings = Settings(device, 0.0, str(tmp_path), True, {})
    words = words_of(Cell(verb, "splade", gpus), tmp_path, tmp_path / "model", settings, "all")
    request = read_request([*words, f"output={tmp_path / 'output'}"], verb)
    with composer(request, verb) as opened:
        (cfg,) = opened.variants()
    if gpus > 1:
        check_gpus(cfg.gpus, cfg.device)
    assert (cfg.gpus, cfg.device) == (gpus, None if device == "cuda" else "cpu")


@pytest.mark.slow
def test_a_command_is_run(tmp_path):
    output = tmp_path / "collections.jsonl"
    words = ["collections", "--miniature", "--device", "cpu", "--kinds", "splade", "--gpus", "1"]
    words += ["--only", ENCODE]
    main([*words, "--output", str(output), "--folder", str(tmp_path / "left")])
    (record,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert (record["verb"], record["status"]) == (ENCODE, "ok") and record["texts_per_s"] > 0
    assert not list(Path(tmp_path / "left").glob("encode-*"))
