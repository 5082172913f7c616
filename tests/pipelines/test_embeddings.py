"""The cache of embeddings: what is in it, that it goes on where it stopped, what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sparton.datasets.tokenization import PackedTokenizer
from sparton.embeddings import EmbeddingTable, TextRows
from sparton.models.backbones import tiny
from sparton.models.dense import DenseEncoder
from sparton.models.folders import Lengths
from sparton.models.folders.dense import load_dense, save_dense
from sparton.models.pooling import Pooling
from sparton.pipelines import embeddings
from sparton.pipelines.embeddings import CachedTexts, cache_embeddings
from sparton.types import Markup

sentence_transformers = pytest.importorskip("sentence_transformers")

DOCUMENTS = [
    "the quick brown fox",
    "a lazy cat sleeps",
    "the quick brown fox",
    "",
    "foxes hunt hens",
]
QUERIES = ["foxes", "a lazy cat sleeps", "hens hens hens"]
DISTINCT = [DOCUMENTS[row] for row in (0, 1, 3, 4)]


@pytest.fixture
def model(tmp_path) -> Path:
    """A dense encoder that has a prompt for queries."""
    body = tiny([*DOCUMENTS, *QUERIES], hidden_size=32, layers=1).bare()
    dense = DenseEncoder(body, Pooling("mean", True), Markup(query_prompt="lazy "))
    (tmp_path / "dense").mkdir()
    save_dense(dense, tmp_path / "dense", Lengths(8, 8))
    return tmp_path / "dense"


def cache(output: Path, model: object, documents=DOCUMENTS, **settings: object) -> CachedTexts:
    settings = {"query_length": 8, "document_length": 8, "progress": False} | settings
    return cache_embeddings(QUERIES, documents, output, model=model, device="cpu", **settings)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 1e-3)])
def test_rows_are_the_embeddings_of_sentence_transformers(dtype, tolerance, model, tmp_path):
    path = tmp_path / "cache"
    assert cache(path, model, dtype=dtype, batch_tokens=7) == (3, 4, 32)
    theirs = sentence_transformers.SentenceTransformer(str(model), device="cpu")
    rows, table = TextRows(path), EmbeddingTable(path)
    assert table.width == 32 and np.load(path / "embeddings.npy").dtype == dtype
    for texts, find, encode in (
        (QUERIES, rows.queries, theirs.encode_query),
        (DISTINCT[::-1], rows.documents, theirs.encode_document),
    ):
        expected = encode(texts, convert_to_tensor=True)
        actual = table.take(find(texts).input_ids)
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
        assert not torch.allclose(actual.roll(1, 0), expected, atol=10 * tolerance)
    assert len(np.load(path / "keys.npy")) == len(QUERIES) + len(DISTINCT)
    copied = sentence_transformers.SentenceTransformer(str(path / "model"), device="cpu")
    assert np.array_equal(copied.encode(QUERIES), theirs.encode(QUERIES))


def test_embeddings_are_what_the_pooling_gives(model, tmp_path):
    """Of any length where the folder has no Normalize, though its encoder compares by cosine."""
    dense = load_dense(model)
    unnormalized = DenseEncoder(dense.body, Pooling("cls"), dense.markup)
    cache(tmp_path / "cache", unnormalized)
    rows, table = TextRows(tmp_path / "cache"), EmbeddingTable(tmp_path / "cache")
    assert not rows.facts.normalized and rows.facts.pooling == "cls"
    found = table.take(rows.queries(QUERIES).input_ids)
    tokens = PackedTokenizer(dense.body.tokenizer, 8, 8, markup=dense.markup).queries(QUERIES)
    with torch.no_grad():
        expected = dense.body.eval().hidden_states(tokens)[tokens.cu_seqlens[:-1].long()]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found.norm(dim=1) - 1).abs().min() > 0.1


def test_a_run_that_was_stopped_goes_on_where_it_was(model, tmp_path, monkeypatch):
    cache(tmp_path / "whole", model)
    whole = np.load(tmp_path / "whole/embeddings.npy")
    monkeypatch.setattr(embeddings, "PART", 2)
    encode, seen = embeddings.encode_texts, []

    def stopping(encoder, tokenizer, texts, side, **settings):
        seen.append(len(texts))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return encode(encoder, tokenizer, texts, side, **settings)

    monkeypatch.setattr(embeddings, "encode_texts", stopping)
    path = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        cache(path, model)
    assert seen == [2, 1, 2, 2]
    with pytest.raises(
        ValueError, match=r"holds 5 of 7 embeddings: the same sparton embed .* goes on"
    ):
        TextRows(path)
    cache(path, model)
    assert seen == [2, 1, 2, 2, 2]
    np.testing.assert_allclose(np.load(path / "embeddings.npy"), whole, atol=1e-6)
    assert cache(path, load_dense(model)) == (3, 4, 32)
    assert len(seen) == 5, "a loaded model is the same as that of its folder"


def test_other_texts_models_and_folders_are_refused(model, tmp_path):
    path = tmp_path / "cache"
    cache(path, model)
    for other in ({"query_length": 6}, {"dtype": "float16"}):
        with pytest.raises(ValueError, match="by another model or with other settings: choose"):
            cache(path, model, **other)
    with pytest.raises(ValueError, match="holds embeddings of other texts"):
        cache(path, model, documents=[*DOCUMENTS, "hens"])
    with pytest.raises(ValueError, match="is there and no cache of embeddings"):
        cache(model, model)
    assert (model / "modules.json").is_file()
    (model / "modules.json").unlink()
    with pytest.raises(FileNotFoundError, match="it is no sentence-transformers model"):
        cache(tmp_path / "new", model)


def test_a_damaged_cache_is_neither_used_nor_taken_for_whole(model, tmp_path):
    path = tmp_path / "cache"
    cache(path, model)
    values = np.load(path / "embeddings.npy", mmap_mode="r+")
    values[2, 3] += 1e-3
    values.flush()
    for use in (lambda: cache(path, model), lambda: EmbeddingTable(path)):
        with pytest.raises(ValueError, match=r"damaged \(embeddings\.npy has another content"):
            use()
