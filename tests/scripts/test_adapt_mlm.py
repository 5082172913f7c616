"""The masked-language-modelling script, in miniature and from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparton.models.backbones import pretrained, tiny
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder
from sparton.types import TokenBatch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/adapt_mlm.py"
# Words come in fixed pairs, so a hidden word can be told from its neighbour.
PAIRS = [(f"left{row}", f"right{row}") for row in range(12)]


def sentence(row: int) -> str:
    chosen = [PAIRS[(row * 7 + step * (1 + row % 5)) % len(PAIRS)] for step in range(6)]
    return " ".join(f"{left} {right}" for left, right in chosen)


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """A corpus and a small masked-language model that knows its words."""
    texts = [sentence(row) for row in range(400)]
    (tmp_path / "corpus").mkdir()
    with (tmp_path / "corpus/corpus.jsonl").open("w") as file:
        for row, text in enumerate([*texts, ""]):
            file.write(json.dumps({"_id": str(row), "title": "", "text": text}) + "\n")
    encoder = SpladeEncoder(tiny(texts, hidden_size=64, layers=1, max_length=32), EagerHead())
    save_encoder(encoder, tmp_path / "start", query_length=32, document_length=32)
    return tmp_path / "corpus", tmp_path / "start"


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_few_steps_teach_the_pairs_and_the_result_loads(folders, tmp_path):
    corpus, start = folders
    output = tmp_path / "adapted"
    result = run(
        corpus, "--output", output, "--backbone", start, "--steps", 150, "--batch-tokens", 1024,
        "--lr", 1e-2, "--head-lr", 1e-2, "--length", 20, "--active-terms", 9,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "400 texts" in result.stdout
    losses = [
        float(line.split("held-out loss ")[1].split(",")[0])
        for line in result.stdout.splitlines()
        if "held-out loss" in line
    ]
    assert losses[1] < 0.25 * losses[0]

    backbone = pretrained(str(output)).eval()
    ids = backbone.tokenizer("left3 [MASK] left5 right5")["input_ids"]
    with torch.no_grad():
        logits = backbone.decoder(backbone(TokenBatch.from_lists([ids])))
    assert backbone.tokenizer.convert_ids_to_tokens(int(logits[2].argmax())) == "right3"

    encoder = load_encoder(output, EagerHead()).eval()
    texts = encoder.tokenizer([sentence(row)[:60] for row in range(100)])["input_ids"]
    active = (encoder(TokenBatch.from_lists(texts)) > 0).sum(1).float().mean()
    assert 5 < active < 15


def test_a_folder_without_corpus_is_named(tmp_path):
    result = run(tmp_path, "--output", tmp_path / "adapted", "--steps", 1)
    assert result.returncode != 0
    assert "corpus.jsonl" in result.stderr
