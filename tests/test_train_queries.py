"""train.py with query encoders of their own: what is logged, saved, evaluated and refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.folders import encoder_lengths, load_encoder
from tests.test_train import run_here

pytestmark = pytest.mark.slow

STATIC = "query_0_SparseStaticEmbedding"
TEXTS = ["the first text", "another one, a little longer than the first"]
LEARNED = ["query_encoder=static", "query_encoder.frozen=false", "query_encoder.lr=0.1"]
SMALL = [
    "query_encoder=separate",
    "backbone@query_encoder.backbone=tiny",
    "query_encoder.backbone.hidden_size=16",
]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("learned")
    return folder, run_here(folder, *LEARNED, "evaluation=none")


def test_learned_queries_have_a_rate_a_regularizer_and_a_count(learned):
    folder, records = learned
    for record in records:
        assert record["learning_rate_query"] == pytest.approx(10 * record["learning_rate"])
        assert {"loss_query_flops", "query_positive_weights"} <= record.keys()
    weights = load_file(folder / "model" / STATIC / "model.safetensors")["weight"]
    assert not torch.allclose(weights[5:], torch.ones(()), atol=1e-3)


def test_frozen_queries_have_none(tmp_path):
    records = run_here(tmp_path, "query_encoder=static")
    assert not any(key.startswith("loss_query") for key in records[0])
    assert "learning_rate_query" not in records[0]
    assert 0 < json.loads((tmp_path / "results.json").read_text())["mean"]["ndcg@10"] < 1
    weights = load_file(tmp_path / "model" / STATIC / "model.safetensors")["weight"]
    assert torch.equal(weights, torch.cat([torch.zeros(5), torch.ones(len(weights) - 5)]))


def test_micro_batches_give_the_same_model(learned, tmp_path):
    folder, _ = learned
    run_here(tmp_path, *LEARNED, "evaluation=none", "micro_batch=3")
    for file in ("model.safetensors", f"{STATIC}/model.safetensors"):
        whole, parts = (load_file(each / "model" / file) for each in (folder, tmp_path))
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(1.01 * parts["weight"], whole["weight"], rtol=1e-3, atol=1e-4)


def test_separate_queries_travel_to_sentence_transformers(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    run_here(tmp_path, *SMALL, "evaluation=none")
    path = tmp_path / "model"
    encoder = load_encoder(path).eval()
    assert encoder_lengths(path) == (24, 64)
    tokenizer = PackedTokenizer(encoder.tokenizer, 24, 64, query_tokenizer=encoder.query_tokenizer)
    model = sentence_transformers.SparseEncoder(str(path), device="cpu")
    with torch.no_grad():
        queries = encoder.encode(tokenizer.queries(TEXTS), "query").sparse
        documents = encoder.encode(tokenizer.documents(TEXTS), "document").sparse
    torch.testing.assert_close(model.encode_query(TEXTS).to_dense(), queries)
    torch.testing.assert_close(model.encode_document(TEXTS).to_dense(), documents)
    assert not torch.allclose(queries, documents, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["query_encoder=static", "query_encoder.weights=nowhere.json"],
            "`sparton idf` writes one",
        ),
        (["query_encoder=static", "head=colbert"], "ColbertEncoder gives documents no weights"),
        ([*SMALL, "query_encoder.backbone.vocabulary_size=99"], "has 99 vocabulary rows, the doc"),
    ],
)
def test_queries_that_cannot_meet_documents_are_refused(tmp_path, settings, message):
    with pytest.raises((ValueError, OSError), match=message):
        run_here(tmp_path, *settings, "evaluation=none")
