"""Embeddings in the place of a backbone: training on a cache, and the whole model that is saved."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sparton.datasets.tokenization import PackedTokenizer
from sparton.embedding_files import CacheFacts, seal_cache
from sparton.embeddings import text_keys
from sparton.evaluation import explain, load_retriever
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.cached import CachedBackbone
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.dense import DenseEncoder
from sparton.models.folders import Lengths, load_encoder, save_encoder
from sparton.models.folders.dense import save_dense
from sparton.models.heads import EagerHead
from sparton.models.pooling import Pooling
from sparton.types import Markup

QUERIES = ["a quick fox", "lazy cats"]
DOCUMENTS = ["the quick brown fox jumps over the lazy dog", "a lazy cat", "foxes hunt hens"]
LENGTHS = {"query_length": 8, "document_length": 12}
HEAD = AutoencoderHead(
    hidden_dim=64,
    k=6,
    k_aux=8,
    normalize_pooled=True,
    query_prompt="the quick ",
    include_prompt=False,
)


@pytest.fixture
def cache(tmp_path) -> Path:
    """What ``cache_embeddings`` writes."""
    folder = tmp_path / "cache"
    (folder / "model").mkdir(parents=True)
    dense = DenseEncoder(
        tiny(QUERIES + DOCUMENTS, hidden_size=32, layers=1).bare().eval(),
        Pooling("mean", True),
        Markup(query_prompt="the quick ", include_prompt=False),
    )
    save_dense(dense, folder / "model", Lengths(8, 12))
    tokenizer = PackedTokenizer(dense.body.tokenizer, 8, 12, markup=dense.markup)
    sides = tokenizer.queries(QUERIES), tokenizer.documents(DOCUMENTS)
    with torch.no_grad():
        rows = [dense.pooling(dense.body.hidden_states(tokens), tokens) for tokens in sides]
    np.save(folder / "embeddings.npy", torch.cat(rows).numpy())
    np.save(folder / "keys.npy", text_keys(QUERIES + DOCUMENTS))
    facts = CacheFacts(2, 8, 12, "mean", True, "the quick ", "", "digest", False)
    (folder / "cache.json").write_text(json.dumps(facts._asdict()))
    (folder / "progress.json").write_text('{"rows": 5}')
    seal_cache(folder)
    return folder


def cached_encoder(cache: Path, **settings: object) -> AutoencoderEncoder:
    torch.manual_seed(0)
    encoder = build_encoder(CachedBackbone(cache), dataclasses.replace(HEAD, **settings))
    assert isinstance(encoder, AutoencoderEncoder)
    return encoder


def test_rows_of_a_cache_give_what_the_saved_model_makes_of_the_texts(cache, tmp_path):
    encoder = cached_encoder(cache)
    used = encoder.encode(encoder.text_rows.queries(QUERIES), "query").used
    for _ in range(3):
        encoder.observe(used, used)
    save_encoder(encoder, tmp_path / "model", **LENGTHS)
    whole = load_encoder(tmp_path / "model")
    assert whole.text_rows is None and whole.markup == encoder.markup
    assert whole.autoencoder.passes_since_active.unique().tolist() == [1, 12]
    for each in (whole.autoencoder, encoder.autoencoder):
        assert torch.equal(each.passes_since_active == 1, used[1])
    tokenizer = PackedTokenizer(whole.tokenizer, 8, 12, markup=whole.markup)
    rows = encoder.text_rows
    for texts, cached, read in (
        (QUERIES, rows.queries, tokenizer.queries),
        (DOCUMENTS, rows.documents, tokenizer.documents),
    ):
        expected = whole.eval()(read(texts))
        torch.testing.assert_close(encoder(cached(texts)), expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(expected.roll(1, 0), expected, atol=1e-2)


def test_the_autoencoder_alone_is_there_to_learn(cache):
    encoder = cached_encoder(cache).train()
    assert all(name.startswith("autoencoder.") for name, _ in encoder.named_parameters())
    assert encoder.device == torch.device("cpu") and encoder.max_length is None
    assert encoder.flops_per_token(1.0) == 3 * 8 * 64 * 32
    reps = encoder.encode(encoder.text_rows.documents(DOCUMENTS), "document")
    reps.losses["reconstruction_k"].mean().backward()
    assert encoder.autoencoder.encoder.weight.grad.any()


def test_latents_are_explained_by_their_numbers(cache, tmp_path):
    save_encoder(cached_encoder(cache), tmp_path / "model", **LENGTHS)
    encoder, tokenizer = load_retriever(tmp_path / "model")
    explained = explain(encoder, tokenizer, DOCUMENTS[0], k=3)
    values, indices = encoder.eval().topk(tokenizer.documents(DOCUMENTS[:1]), "document", 3)
    assert [name for name, _ in explained] == [f"latent {row}" for row in indices[0].tolist()]
    assert [weight for _, weight in explained] == pytest.approx(values[0].tolist())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "cls"}, "made with pooling='mean', but the head has 'cls': set head.pooling="),
        ({"normalize_pooled": False}, "set head.normalize_pooled=True"),
        ({"query_prompt": ""}, "set head.query_prompt='the quick '"),
        ({"include_prompt": True}, "set head.include_prompt=False"),
    ],
)
def test_heads_that_would_make_other_embeddings_are_refused(settings, message, cache):
    with pytest.raises(ValueError, match=message):
        cached_encoder(cache, **settings)


def test_heads_that_read_tokens_are_refused(cache):
    with pytest.raises(ValueError, match="EagerHead reads the states of all tokens"):
        build_encoder(CachedBackbone(cache), EagerHead())
