"""Late-interaction and joint models from texts to rankings, against scores of single pairs."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparton.datasets.tokenization import PackedTokenizer
from sparton.evaluation import evaluate_encoder, explain, explain_match, load_retriever
from sparton.kernels.maxsim import maxsim_reference
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.csr import AutoencoderHead
from sparton.models.dense import DenseEncoder
from sparton.models.encoder import Encoder
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointHead
from sparton.models.pooling import Pooling
from sparton.representations import Representations
from sparton.retrieval.indexes.compression import CompressedIndexBuilder
from sparton.types import RetrievalTask
from tests.evaluation.problems import DOCUMENTS, QUERIES, make_task, write_beir

ROOT = Path(__file__).resolve().parents[2]


def build(
    joint: bool, dense: Pooling | None = None, weights: dict[str, float] | None = None
) -> tuple[Encoder, PackedTokenizer]:
    torch.manual_seed(0)
    backbone = tiny(DOCUMENTS.values(), hidden_size=32, layers=1, max_length=32)
    head = ColbertHead(8, skiplist=["fish", "bird"])
    if joint:
        head = JointHead(EagerHead(), head, dense, weights)
    encoder = build_encoder(backbone, head)
    if joint:
        with torch.no_grad():
            encoder.backbone.decoder.bias.sub_(encoder.backbone.decoder.bias.mean() + 0.5)
    tokenizer = PackedTokenizer(
        encoder.tokenizer,
        query_length=8,
        document_length=12,
        max_length=encoder.max_length,
        markup=encoder.markup,
        query_tokenizer=encoder.query_tokenizer,
    )
    return encoder, tokenizer


def pair_scores(encoder: Encoder, tokenizer: PackedTokenizer, task: RetrievalTask) -> np.ndarray:
    """MaxSim fp64 ``[Q, N]``, one text encoded at a time."""
    both = encoded_alone(encoder, tokenizer, task)
    sides = [[each.tokens for each in side] for side in both]
    rows = []
    for q in sides[0]:
        bounds = q.cu_seqlens
        pairs = [
            maxsim_reference(
                q.values.double(), d.values.double(), bounds, d.cu_seqlens, q.mask, d.mask
            )
            for d in sides[1]
        ]
        rows.append([pair.item() for pair in pairs])
    return np.array(rows)


@torch.no_grad()
def encoded_alone(
    encoder: Encoder, tokenizer: PackedTokenizer, task: RetrievalTask
) -> list[list[Representations]]:
    """Queries and documents, one text encoded at a time."""
    encoder.eval()
    return [
        [encoder.encode(tokenizer.queries([text]), "query") for text in task.queries.texts],
        [encoder.encode(tokenizer.documents([t]), "document") for t in task.documents.texts],
    ]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("vector_dtype", ["float32", "float16"])
def test_rankings_are_those_of_the_scores_of_pairs(joint, vector_dtype):
    encoder, tokenizer = build(joint)
    task = make_task()
    result = evaluate_encoder(
        encoder, tokenizer, task, vector_dtype=vector_dtype, search="maxsim", progress=False
    )
    truth = pair_scores(encoder, tokenizer, task)
    tolerance = {"float32": 1e-5, "float16": 8 * 2**-10}[vector_dtype]
    found = np.take_along_axis(truth, result.run.rows[:, :6], axis=1)
    np.testing.assert_allclose(result.run.scores[:, :6], found, atol=tolerance)
    np.testing.assert_array_equal(result.run.rows[:, :6], np.argsort(-truth, axis=1))
    assert np.abs(np.diff(np.sort(truth, axis=1))).min() > tolerance, "no near ties in the case"
    assert result.query_vectors == 8, "expansion counts"
    skipped = sum(text.count("fish") + text.count("bird") for text in DOCUMENTS.values())
    words = sum(len(text.split()) for text in DOCUMENTS.values())
    assert result.document_vectors == pytest.approx(3 + (words - skipped) / 6)


def test_joint_model_reranks_what_its_terms_find():
    encoder, tokenizer = build(joint=True)
    task = make_task()
    sparse, both = (
        evaluate_encoder(encoder, tokenizer, task, search=search, progress=False)
        for search in ("sparse", None)
    )
    assert (sparse.search, both.search) == ("sparse", "sparse + maxsim")
    truth = pair_scores(encoder, tokenizer, task)
    for candidates, rows, scores in zip(sparse.run.rows, both.run.rows, truth, strict=True):
        candidates, rows = candidates[candidates >= 0], rows[rows >= 0]
        assert rows.tolist() == sorted(candidates, key=lambda row: -scores[row])
        assert len(rows) > 1


def test_all_scores_of_a_model_with_three_halves_are_added_up():
    weights = {"sparse": 0.5, "tokens": 2.0, "dense": 30.0}
    encoder, tokenizer = build(joint=True, dense=Pooling("mean", True), weights=weights)
    task = make_task()
    results = {
        search: evaluate_encoder(
            encoder, tokenizer, task, search=search, vector_dtype="float32", progress=False
        )
        for search in ("sparse", "maxsim", "dense", "rerank", None)
    }
    assert [each.search for each in results.values()] == [
        "sparse", "maxsim", "dense", "sparse + maxsim", "sum"
    ]  # fmt: skip
    tokens = pair_scores(encoder, tokenizer, task)
    sparse, dense = (
        np.array([[pair(q, d) for d in sides[1]] for q in sides[0]])
        for sides in [encoded_alone(encoder, tokenizer, task)]
        for pair in (
            lambda q, d: (q.sparse.double() @ d.sparse.double().T).item(),
            lambda q, d: (q.dense.values.double() @ d.dense.values.double().T).item(),
        )
    )
    truth = {"maxsim": tokens, "dense": dense, None: 0.5 * sparse + 2 * tokens + 30 * dense}
    for search, wanted in truth.items():
        run = results[search].run
        np.testing.assert_array_equal(run.rows[:, :6], np.argsort(-wanted, axis=1))
        np.testing.assert_allclose(run.scores[:, :6], -np.sort(-wanted, axis=1), atol=1e-4)
    assert not np.allclose(results[None].run.scores[:, :6], -np.sort(-tokens, axis=1), atol=1)
    with pytest.raises(
        ValueError, match=r"search='sum' compares dense vectors, .*=sparse or maxsim or rerank"
    ):
        evaluate_encoder(*build(joint=True), task, search="sum", progress=False)
    with pytest.raises(ValueError, match=r"does not compare dense vectors, .* set search='rerank'"):
        evaluate_encoder(
            encoder, tokenizer, task, index=CompressedIndexBuilder(nbits=4), progress=False
        )


def test_bounded_terms_of_a_joint_model():
    encoder, tokenizer = build(joint=True)
    options = {"max_query_terms": 3, "max_document_terms": 2, "progress": False}
    sparse = evaluate_encoder(encoder, tokenizer, make_task(), search="sparse", **options)
    both = evaluate_encoder(encoder, tokenizer, make_task(), **options)
    assert (sparse.query_terms, sparse.document_terms) == (3, 2)
    assert (both.query_terms, both.document_terms, both.query_vectors) == (3, 2, 8)
    assert sparse.flops == pytest.approx(both.flops)


def test_matches_add_up_to_the_score():
    encoder, tokenizer = build(joint=False)
    task = make_task()
    truth = pair_scores(encoder, tokenizer, task)
    texts = next(iter(QUERIES.values())), DOCUMENTS["d4"]
    matches = explain_match(encoder, tokenizer, *texts)
    assert [match.query_token for match in matches][:3] == ["[CLS]", "[Q] ", "red"]
    assert [match.query_token for match in matches][-3:] == ["[MASK]"] * 3
    assert {match.document_token for match in matches} <= {"[CLS]", "[D] ", "blue", "[SEP]"}
    assert sum(match.similarity for match in matches) == pytest.approx(truth[0, 4], abs=1e-5)


def test_terms_are_named_as_the_encoder_names_them():
    encoder, tokenizer = build(joint=True)
    terms = explain(encoder, tokenizer, "red cat", k=5)
    assert len(terms) == 5
    assert all(token in encoder.tokenizer.get_vocab() for token, _ in terms)
    head = AutoencoderHead(hidden_dim=24, k=3)
    latents = build_encoder(tiny(DOCUMENTS.values(), hidden_size=32, layers=1), head)
    texts = PackedTokenizer(latents.tokenizer, 8, 12)
    names = [name for name, _ in explain(latents, texts, "red cat")]
    assert 0 < len(names) <= 3
    assert set(names) <= {f"latent {row}" for row in range(24)}
    result = evaluate_encoder(latents, texts, make_task(), progress=False)
    assert result.search == "sparse"
    assert 0 < result.document_terms <= 3
    capped = evaluate_encoder(latents, texts, make_task(), max_document_terms=1, progress=False)
    assert capped.document_terms <= 1


def test_dense_encoders_are_compared_by_their_one_vector():
    torch.manual_seed(0)
    body = tiny(DOCUMENTS.values(), hidden_size=32, layers=1)
    encoder, texts = DenseEncoder(body, Pooling("mean", True)).eval(), make_task()
    tokenizer = PackedTokenizer(encoder.tokenizer, 8, 12)
    result = evaluate_encoder(encoder, tokenizer, texts, vector_dtype="float32", progress=False)
    with torch.no_grad():
        queries = encoder.encode(tokenizer.queries(texts.queries.texts), "query").tokens.values
        tokens = tokenizer.documents(texts.documents.texts)
        scores = queries @ encoder.encode(tokens, "document").tokens.values.T
    np.testing.assert_allclose(
        result.run.scores[:, :6], scores.sort(dim=1, descending=True).values, atol=1e-6
    )
    assert (result.query_vectors, result.document_vectors) == (1, 1)
    with pytest.raises(ValueError, match="DenseEncoder makes 1 vectors of the 3 tokens of a query"):
        explain_match(encoder, tokenizer, "red", "red")


@pytest.mark.parametrize("joint", [False, True])
def test_a_folder_is_evaluated_as_the_encoder_was(joint, tmp_path):
    encoder, tokenizer = build(joint)
    save_encoder(encoder, tmp_path / "model", query_length=8, document_length=12)
    loaded, own = load_retriever(tmp_path / "model")
    assert (own.query_length, own.document_length) == (8, 12)
    expected = evaluate_encoder(encoder, tokenizer, make_task(), progress=False)
    result = evaluate_encoder(loaded, own, make_task(), progress=False)
    np.testing.assert_array_equal(result.run.rows, expected.run.rows)
    np.testing.assert_allclose(result.run.scores, expected.run.scores, atol=1e-3)
    measured = {"run": None, "seconds": None, "speed": None}
    assert result._replace(**measured) == expected._replace(**measured)


def test_script_searches_as_it_is_told(tmp_path, monkeypatch, capsys):
    encoder, tokenizer = build(joint=False)
    save_encoder(encoder, tmp_path / "model", query_length=8, document_length=12)
    write_beir(tmp_path / "toy")
    monkeypatch.chdir(tmp_path)
    task = ["evaluation=beir_folder", f"evaluation.path={tmp_path / 'toy'}"]
    arguments = ["evaluate.py", "device=cpu", f"model={tmp_path / 'model'}", *task]
    wanted = ["encoder.search=rerank", "encoder.rerank_depth=100", "output=out"]
    wanted += ["metrics=[ndcg@10,recall@100]"]
    monkeypatch.setattr(sys, "argv", [*arguments, *wanted])
    runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    (found,) = json.loads(Path("out/results.json").read_text())["tasks"]
    expected = evaluate_encoder(
        encoder, tokenizer, make_task(), search="rerank", rerank_depth=100,
        metrics=["ndcg@10", "recall@100"], progress=False,
    )  # fmt: skip
    assert found["metrics"] == pytest.approx(expected.metrics)
    assert found["search"] == "bm25 + maxsim"
    assert found["query_vectors"] == 8
    assert not {"query_terms", "flops"} & found.keys()
    assert "vectors q/d" in capsys.readouterr().out
    for setting, message in (
        ("encoder.search=sparse", "encoder.search=sparse compares sparse vectors, which Col"),
        ("encoder.search=fast", "search=fast: must be sparse, maxsim, dense, rerank, sum, or left"),
        (
            "encoder.vector_dtype=int8",
            "encoder.vector_dtype=int8: must be float16 or bfloat16 or float32 or ",
        ),
        ("encoder.max_query_terms=3", "max_query_terms=3 keeps the largest weights"),
    ):
        monkeypatch.setattr(sys, "argv", [*arguments, setting, "output=none"])
        with pytest.raises(SystemExit, match=message):
            runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
