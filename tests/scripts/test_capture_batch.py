"""A training batch of a saved model becomes a problem of the head benchmark."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capture_batch
from head_benchmark import cells, gate, problems, suites
from head_benchmark.suites import Cell
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
    model = folder / "head-eager/seed-3/model"
    model.parent.mkdir(parents=True)
    save_encoder(encoder, model, query_length=8, document_length=10)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    command = [sys.executable, SCRIPT, model, "--pairs", folder / "pairs.jsonl"]
    command += ["--output", folder / "captured.pt", "--device", "cpu"]
    process = subprocess.run(
        [*map(str, command), "--batch", "18"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return encoder, folder / "captured.pt"


@pytest.mark.slow
def test_it_holds_the_gradient_of_a_training_step(captured):
    encoder, path = captured
    problem = problems.captured_problem(path, "cpu")
    description = "documents of 18 pairs of pairs.jsonl under head-eager/seed-3"
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
    dhidden = gate.gradients(SpartonHead(), problem)[1]
    assert (dhidden - expected).norm() < 0.02 * expected.norm()


@pytest.mark.slow
def test_the_benchmark_measures_it(captured, tmp_path):
    settings = cells.Settings("cpu", str(tmp_path), 0.01, miniature=True, captured=str(captured[1]))
    cell = Cell(suites.CAPTURED, "sparton", suites.FORWARD_BACKWARD, suites.CAPTURED)
    assert cells.prepare(cell.truth(), settings)() == {"status": "ok"}
    record = cells.prepare(cell, settings)()
    assert record["status"] == "ok"
    assert record["N"] == 18
    assert 0 < record["active_share"] < 0.5


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("runs/train/batch-512/seed-0/model", "batch-512/seed-0"),
        ("runs/mine/model", "mine"),
        ("models/mine", "mine"),
        ("/model", ""),
    ],
)
def test_a_model_is_named_after_its_run(tmp_path, monkeypatch, folder, name):
    monkeypatch.chdir(tmp_path)
    assert capture_batch.model_name(Path(folder)) == name


def test_another_file_is_refused(tmp_path):
    torch.save({"hidden": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt is no captured batch"):
        problems.captured_problem(tmp_path / "other.pt", "cpu")


@pytest.mark.parametrize("content", ["", '["alone"]\n', "no json\n"])
def test_pairs_that_are_none_are_named(tmp_path, content):
    path = tmp_path / "pairs.jsonl"
    path.write_text(content)
    with pytest.raises(SystemExit, match=r"pairs\.jsonl"):
        capture_batch.read_pairs(path, 1)
