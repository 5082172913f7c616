"""The benchmark of encode.py and evaluate.py: rates are of the texts, and other results show."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch

from benchmarks.command import main
from benchmarks.encoding import collections
from benchmarks.encoding.collections import ENCODE, EVALUATE, STUDY, Cell, Run, words_of
from benchmarks.study import Settings
from sparton.cli.command_line import read_request
from sparton.cli.composing import composer
from sparton.cli.devices import check_gpus

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
        output.mkdir()
        seconds = {"documents": 5.0, "queries": 1.0}
        tasks = {"tasks": [{"seconds": seconds, "metrics": {"ndcg@10": left["text"]}}]}
        (output / "results.json").write_text(json.dumps(tasks))
        (output / "part").write_text(left["text"])
        ran.append((cell.gpus, name))
        return Run(output, SECONDS)

    monkeypatch.setattr(collections, "run", run)
    monkeypatch.setattr(collections, "steady_rate", lambda _, processes: 100.0 * processes)
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
    assert collections.steady_rate(tmp_path, processes) == pytest.approx(rate)


@pytest.mark.parametrize("verb", [ENCODE, EVALUATE])
def test_other_results_on_more_gpus_have_no_rate(prepared, verb):
    left, _, prepare = prepared
    measure = prepare(verb)
    assert measure(Cell(verb, "splade", 1))["status"] == "ok"
    left["text"] = "other"
    assert measure(Cell(verb, "splade", 2)) == {"status": "red_gate"}


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
