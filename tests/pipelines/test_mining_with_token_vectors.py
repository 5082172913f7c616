"""Mining by MaxSim: late-interaction and joint models as miners and teachers."""

import math
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from sparton.datasets.tokenization import PackedTokenizer
from sparton.kernels.maxsim import maxsim_varlen
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointHead
from sparton.pipelines.mining import Rule, TrainedModel, miners
from sparton.pipelines.mining.mining import Mining
from tests.pipelines.mining_problems import generate, mine, write


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def pairs(tmp_path) -> Path:
    return write(tmp_path / "pairs.jsonl", generate())


@pytest.fixture(params=["colbert", "joint"])
def model(request, tmp_path) -> Path:
    torch.manual_seed(0)
    texts = [example["positive"] for example in generate()]
    head = ColbertHead(16)
    joint = request.param == "joint"
    backbone = tiny(texts, hidden_size=32, layers=1, max_length=32)
    encoder = build_encoder(backbone, JointHead(EagerHead(), head) if joint else head)
    save_encoder(encoder, tmp_path / request.param, query_length=16, document_length=32)
    return tmp_path / request.param


@torch.no_grad()
def scores_of(model: Path, queries: list[str], documents: list[str]) -> torch.Tensor:
    encoder = load_encoder(model).eval()
    tokenizer = PackedTokenizer(encoder.tokenizer, 16, 32, markup=encoder.markup)
    asked = encoder.encode(tokenizer.queries(queries), "query").tokens
    given = encoder.encode(tokenizer.documents(documents), "document").tokens
    bounds = asked.cu_seqlens, given.cu_seqlens
    return maxsim_varlen(asked.values, given.values, *bounds, asked.mask, given.mask)


def test_a_model_mines_by_maxsim_and_keeps_what_it_encoded(pairs, model, tmp_path, monkeypatch):
    monkeypatch.setattr(miners, "SLAB", 16)
    examples = generate()
    documents = [example["positive"] for example in examples]
    settings = {"miner": TrainedModel(model), "rule": Rule(3), "output": tmp_path / "out.jsonl"}
    with monkeypatch.context() as patched:
        patched.setattr(Mining, "part", lambda self, *ends: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mine(pairs, **settings)
    slabs = sorted((tmp_path / "out.jsonl.parts").glob("*.safetensors"))
    assert len(slabs) == 3
    slabs[1].unlink()
    real, encoded = miners.encode_texts, []

    def encode_texts(encoder, tokenizer, texts, side, **options):
        encoded.append(len(texts))
        return real(encoder, tokenizer, texts, side, **options)

    monkeypatch.setattr(miners, "encode_texts", encode_texts)
    records = mine(pairs, **settings)
    assert encoded == [16, 40]  # the slab that was missing, and the queries
    scores = scores_of(model, [example["query"] for example in examples], documents)
    for row, record in enumerate(records):
        scores[row, row] = -math.inf
        expected = scores[row].topk(3).values
        found = scores[row, [documents.index(text) for text in record["neg"]]]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_margin_to_the_positive_is_measured_by_maxsim(pairs, model, tmp_path):
    miner = TrainedModel(model)
    records = mine(pairs, tmp_path / "out.jsonl", miner=miner, rule=Rule(3, margin=0.25))
    for record in records:
        scores = scores_of(model, [record["query"]], [*record["pos"], *record["neg"]])[0]
        assert (scores[1:] < scores[0] - 0.25 + 2e-3).all()
    free = mine(pairs, tmp_path / "free.jsonl", miner=miner, rule=Rule(3))
    assert [each["neg"] for each in free] != [each["neg"] for each in records], "some are refused"


def test_a_model_as_teacher_writes_maxsim(pairs, model, tmp_path):
    settings = {"teacher": TrainedModel(model), "rule": Rule(2)}
    records = mine(pairs, tmp_path / "out.jsonl", **settings)
    for record in records[:5]:
        expected = scores_of(model, [record["query"]], [*record["pos"], *record["neg"]])[0]
        found = record["pos_scores"] + record["neg_scores"]
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
        assert len(set(found)) == 3


def test_bounded_terms_need_a_sparse_half(pairs, model, tmp_path):
    settings = {"miner": TrainedModel(model, max_document_terms=4), "rule": Rule(2)}
    if model.name == "joint":
        assert mine(pairs, tmp_path / "out.jsonl", **settings)
        return
    with pytest.raises(ValueError, match="max_document_terms=4 keeps a text's largest weights"):
        mine(pairs, tmp_path / "out.jsonl", **settings)
