"""A training batch of a saved model becomes a problem of the head benchmark."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capture_batch
from benchmarks.head import judge, problems, suites
from benchmarks.head.study import STUDY
from benchmarks.head.suites import Cell
from benchmarks.study import Settings
from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.backbones import tiny
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.representations import Representations

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/capture_batch.py"
PAIRS = [
    (f"left{n} word{n % 3}", " ".join(f"right{n + k}" for k in range(1 + n % 7))) for n in range(20)
]


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """The encoder, and the file that the script wrote of it."""
    folder = tmp_path_factory.mktemp("capture")
    texts = [text for pair in PAIRS for text in pair]
    encoder = SpladeEncoder(tiny(texts, hidden_size=32, layers=1, max_length=16), EagerHead())
    model = folder / "model"
    save_encoder(encoder, model, query_length=8, document_length=10)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    command = [sys.executable, SCRIPT, model, "--pairs", folder / "pairs.jsonl"]
    command += ["--output", folder / "captured.pt", "--device", "cpu", "--name", "mine"]
    process = subprocess.run(
        [*map(str, command), "--batch", "18"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return encoder, folder / "captured.pt"


@pytest.mark.slow
def test_it_holds_the_gradient_of_a_training_step(captured):
    encoder, path = captured
    problem = problems.captured_problem(path, "cpu")
    description = "documents of 18 pairs of pairs.jsonl under mine"
    assert problems.describe_capture(path) == description
    assert problem.hidden.dtype == problem.weight.dtype == torch.bfloat16
    assert problem.tokens.max_seqlen <= 10

    tokenizer = PackedTokenizer(encoder.tokenizer, 8, 10)
    queries, documents = zip(*PAIRS[:18], strict=True)
    queries, documents = tokenizer.queries(queries), tokenizer.documents(documents)
    assert torch.equal(documents.cu_seqlens, problem.tokens.cu_seqlens)
    assert torch.equal(documents.position_ids, problem.tokens.position_ids)
    hidden = encoder.backbone(documents).detach().requires_grad_()
    decoder = encoder.backbone.decoder
    reps = encoder.head(hidden, decoder.weight, decoder.bias, documents)
    loss = capture_batch.training_objective(1e-3)(
        Representations(encoder(queries)), Representations(reps), step=1
    ).loss
    (expected,) = torch.autograd.grad(loss, hidden)
    dhidden = judge.gradients(SpartonHead(), problem)[1]
    assert (dhidden - expected).norm() < 0.02 * expected.norm()


@pytest.mark.slow
def test_the_benchmark_measures_it(captured, tmp_path):
    settings = Settings("cpu", 0.01, str(tmp_path), True, {"captured": str(captured[1])})
    cell = Cell(suites.CAPTURED, "sparton", suites.FORWARD_BACKWARD, suites.CAPTURED)
    assert cell in STUDY.suites(settings)[suites.CAPTURED]
    (truth,) = STUDY.needs(cell, settings)
    before = STUDY.place(truth, settings)
    STUDY.keep(truth, STUDY.prepare([truth], settings)(truth), settings)
    record = STUDY.prepare([cell], settings)(cell)
    assert record["status"] == "ok"
    assert record["N"] == 18
    assert 0 < record["active_share"] < 0.5
    assert STUDY.context(suites.CAPTURED, settings)["captured"].startswith("documents of 18 pairs")
    os.utime(captured[1], (1, 1))
    assert STUDY.place(truth, settings) != before


def test_another_file_is_refused(tmp_path):
    torch.save({"hidden": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt is no captured batch"):
        problems.captured_problem(tmp_path / "other.pt", "cpu")


@pytest.mark.parametrize("content", ["", '["alone"]\n', "no json\n", '["a", "b"]\n'])
def test_pairs_that_are_none_or_too_few_are_named(tmp_path, content):
    path = tmp_path / "pairs.jsonl"
    path.write_text(content)
    with pytest.raises((SystemExit, ValueError), match=r"pairs\.jsonl"):
        capture_batch.read_pairs(path, 2)
