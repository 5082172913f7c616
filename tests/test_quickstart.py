"""The quickstart in miniature: its script from the first table to the last hint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MINIATURE = [
    "steps=24",
    "batch=32",
    "log_every=4",
    "evaluation.every=12",
    "num_workers=0",
    "backbone.hidden_size=32",
]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> tuple[str, Path]:
    """What the script printed, and its run folder."""
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    command = [sys.executable, "scripts/quickstart.py", *MINIATURE, f"hydra.run.dir={folder}"]
    wide = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=wide)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder


@pytest.mark.slow
def test_the_loss_falls_and_everything_is_written(quickstart):
    _, folder = quickstart
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["loss_ranking"] < 0.7 * records[0]["loss_ranking"]
    found = [record["dev_ndcg@10"] for record in records if "dev_ndcg@10" in record]
    assert found[-1] > found[0] > 0
    assert (folder / "model" / "model.safetensors").exists()
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_it_ends_with_a_table_and_a_decoded_document(quickstart):
    printed, folder = quickstart
    last = printed.rpartition("After training")[2]
    figures = {
        words[1]: float(words[3])
        for words in map(str.split, last.splitlines())
        if len(words) > 3 and words[1] in ("BM25", "trained")
    }
    assert list(figures) == ["BM25", "trained"]
    trained = json.loads((folder / "results.json").read_text())["mean"]["ndcg@10"]
    assert figures["trained"] == pytest.approx(trained, abs=1e-3)
    assert "learned, not in the text" in last
