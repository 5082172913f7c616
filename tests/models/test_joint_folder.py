"""Folders of joint encoders: one checkpoint, either half loaded by sentence-transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.folders import encoder_lengths, load_encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.joint import JointEncoder, JointHead
from tests.models.late_interaction import LENGTHS, TEXTS, TOLERANCE, saved, scores

sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6.0")


def make_encoder(seed: int = 0, pooling: str = "max", **settings) -> JointEncoder:
    backbone = tiny(TEXTS, hidden_size=32, layers=1, max_length=20, decoder_bias=-1.0)
    torch.manual_seed(seed)
    return JointEncoder(backbone, JointHead(EagerHead(pooling), ColbertHead(8, **settings))).eval()


@torch.no_grad()
def terms(encoder: JointEncoder) -> list[Tensor]:
    """Of the texts as queries and as documents; queries are short enough to be left uncut."""
    tokenizer = PackedTokenizer(encoder.tokenizer, **LENGTHS, markup=encoder.markup)
    queries, documents = tokenizer.queries(TEXTS[1:]), tokenizer.documents(TEXTS)
    return [
        encoder.encode(queries, "query").sparse,
        encoder.encode(documents, "document").sparse,
    ]


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
