"""Run folders become records, records become the tables of the README."""

import argparse
import json
from pathlib import Path

import pytest

import record_runs
from make_tables import TABLES
from recipes.kinds import kinds
from sparton.models.heads import OtherSettings
from sparton.types import Prompts
from tables import in_domain, records


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


def test_a_record_says_what_was_read_of_the_texts_of_a_task(run_folder):
    read = {"lengths": {"query": 32, "document": 256}, "cut": {"query": 0.25, "document": 0.0}}
    results = json.loads((run_folder / "results.json").read_text())
    results["tasks"][0] |= read
    (run_folder / "results.json").write_text(json.dumps(results))
    first, second, *_ = record_runs.describe_run(run_folder)["tasks"].values()
    assert first == second | read and not read.keys() & second.keys()


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


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"token_topk": 12}, "SpartonHead token_topk=12"),
        ({"special_terms": False}, "SpartonHead special_terms=False"),
        ({"folding": "case", "fp8": True}, "SpartonHead fp8 folding=case"),
        ({"echo": " "}, "SpartonHead echo= "),
        ({"query_prompt": "ask"}, "SpartonHead query_prompt=ask"),
        ({"chunk_size": 8}, "SpartonHead"),  # without effect
    ],
)
def test_a_label_has_what_makes_a_heads_runs_others(options, label):
    usual = {"pooling": "max", "activation": "relu", "token_topk": None, "special_terms": True}
    head = {"_target_": "sparton.models.heads.SpartonHead", **usual, **options}
    assert record_runs.head_name(head) == label


def test_no_option_of_a_head_is_forgotten():
    options = {*OtherSettings.__annotations__, *Prompts.__annotations__} - {"chunk_size"}
    assert options <= set(record_runs.USUAL)


def test_a_row_shows_speed_of_one_and_quality_of_all_seeds(run_folder, monkeypatch):
    record = record_runs.describe_run(run_folder)
    better = json.loads(json.dumps(record).replace('"ndcg@10": 0.5', '"ndcg@10": 0.6'))
    monkeypatch.setattr(in_domain, "read_records", lambda _: [record, better])
    row = TABLES["in_domain"]().splitlines()[2].strip("| ").split(" | ")
    assert row[:4] == ["tiled_compiled", "33", "30", "6.0"]
    assert row[4] == "55.0 ± 7.1"


def test_without_runs_the_table_of_models_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert TABLES["in_domain_models"]() == in_domain.NO_MODELS
    (tmp_path / "a-gpu").mkdir()
    (tmp_path / "a-gpu/in_domain_models.jsonl").write_text("\n")
    assert TABLES["in_domain_models"]() == in_domain.NO_MODELS


def model_record(base: dict, label: str, **sizes: float) -> dict:
    """The record of a run of the study that has these numbers of terms or vectors."""
    figures = {"metrics": {"ndcg@10": 0.5}, "seconds": {}, **sizes}
    environment = base["environment"] | {"packages": {"torch": "2.x"}, "git": {"sha": "0123456789"}}
    tasks = dict.fromkeys(in_domain.TASKS, figures)
    return base | {"label": label, "environment": environment, "tasks": tasks}


def test_the_table_of_models_has_the_systems_in_order_and_what_each_stores(
    run_folder, tmp_path, monkeypatch
):
    base = record_runs.describe_run(run_folder)
    terms, vectors = (
        {f"query_{name}": 3.0, f"document_{name}": size}
        for name, size in (("terms", 90.4), ("vectors", 118.6))
    )
    measured = [
        model_record(base, "joint-mined", **terms, **vectors),
        model_record(base, "colbert-pairs", **vectors),
        model_record(base, "splade-distilled", **terms),
        model_record(base, "splade-distilled", **terms) | {"seed": 4},
        model_record(base, "bm25", **terms),
        model_record(base, "no such system", **terms),
    ]
    for key in ("examples_per_second", "step_ms", "peak_memory_mib"):
        del measured[4][key]
    (tmp_path / "a-gpu").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in measured)
    (tmp_path / "a-gpu/in_domain_models.jsonl").write_text(lines)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    table = TABLES["in_domain_models"]()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert [row[0] for row in rows[2:6]] == [
        "BM25", "splade, distilled", "colbert, pairs", "joint, mined",
    ]  # fmt: skip
    assert rows[2] == ["BM25", "", "", *["50.0"] * 4, "3 / 90"]
    assert rows[3] == ["splade, distilled", "33", "6.0", *["50.0 ± 0.0"] * 4, "3 / 90"]
    assert rows[4][-1] == "3 / 119 vectors"
    assert rows[5][-1] == "3 / 90, 3 / 119 vectors"
    assert {len(row) for row in rows[:6]} == {len(rows[0])}
    assert "no such system" not in table
    assert table.endswith("\n<sub>NVIDIA H200; torch 2.x; commit 012345678</sub>\n")


def test_the_table_of_models_has_a_row_for_every_training_of_the_study(tmp_path):
    arguments = argparse.Namespace(
        data=tmp_path, output=tmp_path, adapt=[], negatives=1, overrides=[]
    )
    measured = [step.label for step in kinds(arguments) if step.study]
    assert list(in_domain.MODELS)[:2] == ["bm25", "dense"]
    assert sorted(measured) == sorted(in_domain.MODELS)
