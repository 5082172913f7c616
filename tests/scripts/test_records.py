"""Run folders become records, records become the tables of the README."""

import json
from pathlib import Path

import pytest

import record_runs
from tables import in_domain


@pytest.fixture
def run_folder(tmp_path) -> Path:
    task = {"metrics": {"ndcg@10": 0.5}, "query_terms": 3, "document_terms": 9, "seconds": {}}
    tasks = [{"name": name, **task} for name in in_domain.TASKS]
    head = {"_target_": "sparton.models.heads.TiledHead", "compiled": True}
    manifest = {"config": {"head": head, "seed": 3}, "command": "train.py", "git": None}
    manifest |= {"packages": {}, "hardware": {"gpu": "NVIDIA H200"}}
    times = [900, 10, 20, 30, 40, 50]  # the first holds compilation
    lines = [
        {"step": row, "step_ms": ms, "data_wait_ms": 0, "examples_per_second": 1e3 / ms}
        | {"tokens_per_second": 1, "memory_allocated_mib": 1024 * row, "loss": 1.0}
        for row, ms in enumerate(times, 1)
    ]
    (tmp_path / "results.json").write_text(json.dumps({"tasks": tasks}))
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_record_holds_medians_without_the_first_line(run_folder):
    record = record_runs.describe_run(run_folder)
    assert (record["label"], record["seed"]) == ("TiledHead compiled", 3)
    assert record["step_ms"] == 30
    assert record["step_ms_p20"] < 30 < record["step_ms_p80"]
    assert record["peak_memory_mib"] == 6 * 1024
    assert record_runs.device_name(record) == "nvidia-h200"


def test_a_later_record_of_the_same_cell_replaces_the_earlier(run_folder, tmp_path):
    path = tmp_path / "study.jsonl"
    record = record_runs.describe_run(run_folder)
    for change in ({}, {"seed": 4}, {"step_ms": 7}):
        record_runs.append(path, record | change)
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["seed"], r["step_ms"]) for r in kept] == [(4, 30), (3, 7)]


@pytest.mark.parametrize(
    ("options", "label", "row"),
    [
        ({"pooling": "max", "activation": "relu", "fp8": False}, "SpartonHead", "**sparton**"),
        ({"fp8": True}, "SpartonHead fp8", "sparton, fp8"),
        ({"pooling": "sum"}, "SpartonHead sum", "**sparton**, sum"),
        (
            {"pooling": "sum", "activation": "log1p_relu"},
            "SpartonHead sum log1p_relu",
            "**sparton**, sum, log1p_relu",
        ),
    ],
)
def test_runs_of_another_variant_have_a_label_and_a_row_of_their_own(options, label, row):
    head = {"_target_": "sparton.models.heads.SpartonHead", **options}
    assert record_runs.head_name(head) == label
    assert in_domain.NAMES[label] == row


def test_a_row_shows_speed_of_one_and_quality_of_all_seeds(run_folder):
    record = record_runs.describe_run(run_folder)
    better = json.loads(json.dumps(record).replace('"ndcg@10": 0.5', '"ndcg@10": 0.6'))
    row = in_domain.in_domain_row("TiledHead compiled", [record, better])
    assert row[:4] == ["tiled_compiled", "33", "30", "6.0"]
    assert row[4] == "55.0 ± 7.1"
