"""Folders of joint encoders: one checkpoint, every half loaded by sentence-transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.dense import DenseEncoder
from sparton.models.folders import encoder_lengths, load_encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.pooling import Pooling
from sparton.representations import Representations
from tests.models.late_interaction import LENGTHS, TEXTS, TOLERANCE, saved, scores

sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6.0")


def make_encoder(
    seed: int = 0, pooling: str = "max", dense: Pooling | None = None, weights=None, **settings
) -> JointEncoder:
    backbone = tiny(TEXTS, hidden_size=32, layers=1, max_length=20, decoder_bias=-1.0)
    torch.manual_seed(seed)
    head = JointHead(EagerHead(pooling), ColbertHead(8, **settings), dense, weights)
    return JointEncoder(backbone, head).eval()


@torch.no_grad()
def encoded(encoder: JointEncoder) -> tuple[Representations, Representations]:
    """The texts as queries and as documents; queries are short enough to be left uncut."""
    tokenizer = PackedTokenizer(encoder.tokenizer, **LENGTHS, markup=encoder.markup)
    queries, documents = tokenizer.queries(TEXTS[1:]), tokenizer.documents(TEXTS)
    return encoder.encode(queries, "query"), encoder.encode(documents, "document")


def terms(encoder: JointEncoder) -> list[Tensor]:
    return [each.sparse for each in encoded(encoder)]


def dense_of(encoder: JointEncoder) -> list[Tensor]:
    return [each.dense.values for each in encoded(encoder)]


def terms_elsewhere(path: Path) -> list[Tensor]:
    model = sentence_transformers.SparseEncoder(str(path), device="cpu")
    options = {"convert_to_sparse_tensor": False}
    return [
        model.encode_query(TEXTS[1:], **options),
        model.encode_document(TEXTS, **options),
    ]


def test_a_round_trip_is_exact(tmp_path):
    encoder = make_encoder()
    path = saved(encoder, tmp_path / "model")
    again = load_encoder(path)
    assert isinstance(again, JointEncoder) and isinstance(again.head.sparse, SpartonHead)
    assert torch.equal(scores(again), scores(encoder))
    exact = load_encoder(path, JointHead(EagerHead(), ColbertHead(8)))
    for actual, expected in zip(terms(exact), terms(encoder)):
        assert torch.equal(actual, expected)
    assert encoder_lengths(path) == (9, 14)
    other = make_encoder(seed=1)
    assert not torch.allclose(scores(other), scores(encoder), atol=1e-2)


@pytest.mark.parametrize(
    "settings",
    [{}, {"pooling": "sum"}, {"query_prompt": "a ", "document_marker": ""}, {"bias": True}],
    ids=["default", "sum", "prompt", "bias"],
)
def test_sentence_transformers_loads_either_half(settings, tmp_path):
    encoder = make_encoder(**settings)
    path = saved(encoder, tmp_path / "model")
    for actual, expected in zip(terms_elsewhere(path), terms(encoder)):
        torch.testing.assert_close(actual, expected, **TOLERANCE)
        assert not torch.allclose(actual.flip(0), expected, atol=1e-3)
    model = sentence_transformers.MultiVectorEncoder(str(path / "colbert"), device="cpu")
    other = model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS))
    torch.testing.assert_close(other, scores(encoder), **TOLERANCE)
    torch.testing.assert_close(scores(load_encoder(path)), scores(encoder), **TOLERANCE)
    half = load_encoder(path / "colbert")
    assert isinstance(half, ColbertEncoder) and encoder_lengths(path / "colbert") == (9, 14)
    torch.testing.assert_close(scores(half), scores(encoder), **TOLERANCE)


@pytest.mark.parametrize(
    ("pooling", "prompts"),
    [
        (Pooling("mean", True), {"query_prompt": "a ", "document_prompt": "dog "}),
        (Pooling("cls", False), {}),
    ],
)
def test_sentence_transformers_loads_the_dense_half(pooling, prompts, tmp_path):
    weights = {"sparse": 0.5, "tokens": 1.0, "dense": 7.0}
    encoder = make_encoder(dense=pooling, weights=weights, **prompts)
    path = saved(encoder, tmp_path / "model")
    expected = dense_of(encoder)
    model = sentence_transformers.SentenceTransformer(str(path / "dense"), device="cpu")
    options = {"convert_to_tensor": True}
    found = [
        model.encode_query(TEXTS[1:], **options), model.encode_document(TEXTS, **options)
    ]  # fmt: skip
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, **TOLERANCE)
        assert not torch.allclose(actual.flip(0), wanted, atol=1e-3)
    assert model.similarity_fn_name == ("cosine" if pooling.normalize else "dot")
    for actual, wanted in zip(terms_elsewhere(path), terms(encoder), strict=True):
        torch.testing.assert_close(actual, wanted, **TOLERANCE)
    again = load_encoder(path)
    assert again.kinds == ("sparse", "tokens", "dense") and again.score_weights == weights
    for actual, wanted in zip(dense_of(again), expected, strict=True):
        torch.testing.assert_close(actual, wanted, **TOLERANCE)
    torch.testing.assert_close(scores(again), scores(encoder), **TOLERANCE)
    half = load_encoder(path / "dense")
    assert isinstance(half, DenseEncoder) and encoder_lengths(path / "dense") == (9, 14)
    assert all((path / name).samefile(path / "dense" / name) for name in ("model.safetensors",))


def test_a_dense_half_that_is_another_is_refused(tmp_path):
    path = saved(make_encoder(dense=Pooling("mean", True)), tmp_path / "model")
    for pooling in (None, Pooling("cls", True)):
        head = JointHead(EagerHead(), ColbertHead(8), pooling)
        with pytest.raises(ValueError, match=r"dense=.* \(the folder: Pooling\(mode='mean'"):
            load_encoder(path, head)
    weights = {"sparse": 1.0, "tokens": 2.0, "dense": 3.0}
    head = JointHead(EagerHead(), ColbertHead(8), Pooling("mean", True), weights)
    assert load_encoder(path, head).score_weights == weights
    (path / "dense/modules.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"dense has no modules\.json"):
        load_encoder(path)


def test_weights_are_stored_once(tmp_path, monkeypatch):
    path = saved(make_encoder(), tmp_path / "model")
    names = ("model.safetensors", "config.json", "tokenizer.json")
    assert all((path / name).samefile(path / "colbert" / name) for name in names)
    assert not (path / "sparton.json").samefile(path / "colbert/sparton.json")

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    copied = saved(make_encoder(), tmp_path / "copied")
    assert not (copied / names[0]).samefile(copied / "colbert" / names[0])
    assert torch.equal(scores(load_encoder(copied)), scores(make_encoder()))


def test_heads_that_differ_from_the_folder_are_refused(tmp_path):
    path = saved(make_encoder(), tmp_path / "model")
    with pytest.raises(ValueError, match=r"width=16 \(the folder: 8\)"):
        load_encoder(path, JointHead(EagerHead(), ColbertHead(16)))
    with pytest.raises(ValueError, match="pooling='sum' \\(the folder: 'max'\\)"):
        load_encoder(path, JointHead(EagerHead("sum"), ColbertHead(8)))
    with pytest.raises(ValueError, match="with a JointHead, and a EagerHead cannot stand in"):
        load_encoder(path, EagerHead())
