"""Mining by MaxSim: late-interaction and joint models as miners and teachers."""

from pathlib import Path

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
from sparton.pipelines.mining import Rule, TrainedModel
from tests.pipelines.mining_problems import check_hardest, generate, mine, mine_after_a_failure


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
    documents = [example["positive"] for example in generate()]
    queries = [example["query"] for example in generate()]
    records = mine_after_a_failure(pairs, model, tmp_path / "out.jsonl", monkeypatch)
    check_hardest(records, documents, scores_of(model, queries, documents), 1e-3)


@pytest.mark.quick(1)
def test_a_margin_to_the_positive_is_measured_by_maxsim(pairs, model, tmp_path):
    miner = TrainedModel(model)
    records = mine(pairs, tmp_path / "out.jsonl", miners=[miner], rule=Rule(3, margin=0.25))
    for record in records:
        scores = scores_of(model, [record["query"]], [*record["pos"], *record["neg"]])[0]
        assert (scores[1:] < scores[0] - 0.25 + 2e-3).all()
    free = mine(pairs, tmp_path / "free.jsonl", miners=[miner], rule=Rule(3))
    assert [each["neg"] for each in free] != [each["neg"] for each in records], "some are refused"


def test_a_model_as_teacher_writes_maxsim(pairs, model, tmp_path):
    settings = {"teachers": [TrainedModel(model)], "rule": Rule(2)}
    records = mine(pairs, tmp_path / "out.jsonl", **settings)
    for record in records[:5]:
        expected = scores_of(model, [record["query"]], [*record["pos"], *record["neg"]])[0]
        found = record["pos_scores"] + record["neg_scores"]
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
        assert len(set(found)) == 3


def test_bounded_terms_need_a_sparse_half(pairs, model, tmp_path):
    settings = {"miners": [TrainedModel(model, max_document_terms=4)], "rule": Rule(2)}
    if model.name == "joint":
        assert mine(pairs, tmp_path / "out.jsonl", **settings)
        return
    with pytest.raises(ValueError, match="max_document_terms=4 keeps a text's largest weights"):
        mine(pairs, tmp_path / "out.jsonl", **settings)
