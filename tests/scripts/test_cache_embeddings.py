"""The cache of embeddings: what is in it, that it goes on where it stopped, what it refuses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import cache_embeddings
from sparton.embeddings import EmbeddingTable, TextRows
from sparton.models.backbones import tiny
from sparton.models.dense import DenseEncoder
from sparton.models.folders.dense import save_dense
from sparton.models.pooling import Pooling
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
def folders(tmp_path) -> tuple[Path, Path]:
    """A BEIR folder, and one with a dense encoder that has a prompt for queries."""
    data, model = tmp_path / "data", tmp_path / "dense"
    data.mkdir()
    model.mkdir()
    for name, texts in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        records = [{"_id": f"{row}", "text": text} for row, text in enumerate(texts)]
        (data / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    body = tiny([*DOCUMENTS, *QUERIES], hidden_size=32, layers=1).bare()
    dense = DenseEncoder(body, Pooling("mean", True), Markup(query_prompt="lazy "))
    save_dense(dense, model, query_length=8, document_length=8)
    return data, model


def cache(monkeypatch, output: Path, folders: tuple[Path, Path], *more: str) -> Path:
    data, model = folders
    lengths = ["--query-length", "8", "--document-length", "8", "--device", "cpu"]
    arguments = ["--output", str(output), "--model", str(model), *lengths, *more, str(data)]
    monkeypatch.setattr(sys, "argv", ["cache_embeddings.py", *arguments])
    cache_embeddings.main()
    return output


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 1e-3)])
def test_rows_are_the_embeddings_of_sentence_transformers(
    dtype, tolerance, folders, tmp_path, monkeypatch
):
    path = cache(monkeypatch, tmp_path / "cache", folders, "--dtype", dtype, "--batch-tokens", "7")
    model = sentence_transformers.SentenceTransformer(str(folders[1]), device="cpu")
    rows, table = TextRows(path), EmbeddingTable(path)
    assert table.width == 32 and np.load(path / "embeddings.npy").dtype == dtype
    for texts, find, encode in (
        (QUERIES, rows.queries, model.encode_query),
        (DISTINCT[::-1], rows.documents, model.encode_document),
    ):
        expected = encode(texts, convert_to_tensor=True)
        actual = table.take(find(texts).input_ids)
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
        assert not torch.allclose(actual.roll(1, 0), expected, atol=10 * tolerance)
    assert len(np.load(path / "keys.npy")) == len(QUERIES) + len(DISTINCT)
    copied = sentence_transformers.SentenceTransformer(str(path / "model"), device="cpu")
    assert np.array_equal(copied.encode(QUERIES), model.encode(QUERIES))


def test_a_run_that_was_stopped_goes_on_where_it_was(folders, tmp_path, monkeypatch):
    whole = np.load(cache(monkeypatch, tmp_path / "whole", folders) / "embeddings.npy")
    monkeypatch.setattr(cache_embeddings, "CHUNK", 2)
    embed, seen = cache_embeddings.embed, []

    def stopping(encoder, tokens):
        seen.append(tokens.num_sequences)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return embed(encoder, tokens)

    monkeypatch.setattr(cache_embeddings, "embed", stopping)
    with pytest.raises(KeyboardInterrupt):
        cache(monkeypatch, tmp_path / "cache", folders)
    assert seen == [2, 1, 2, 2]
    with pytest.raises(ValueError, match="holds 5 of 7 embeddings: run the same scripts/cache_em"):
        TextRows(tmp_path / "cache")
    path = cache(monkeypatch, tmp_path / "cache", folders)
    assert seen == [2, 1, 2, 2, 2]
    np.testing.assert_allclose(np.load(path / "embeddings.npy"), whole, atol=1e-6)
    cache(monkeypatch, tmp_path / "cache", folders)
    assert len(seen) == 5


def test_a_model_that_cuts_its_embeddings_is_refused(folders, tmp_path, monkeypatch):
    file = folders[1] / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncate_dim": 8}))
    with pytest.raises(SystemExit, match="dense cuts embeddings to truncate_dim=8, and an autoenc"):
        cache(monkeypatch, tmp_path / "cache", folders)
    assert not (tmp_path / "cache").exists()


def test_other_texts_models_and_folders_are_refused(folders, tmp_path, monkeypatch):
    path = cache(monkeypatch, tmp_path / "cache", folders)
    for more in (["--query-length", "6"], ["--dtype", "float16"]):
        with pytest.raises(SystemExit, match="by another model or with other settings: choose"):
            cache(monkeypatch, path, folders, *more)
    corpus = folders[0] / "corpus.jsonl"
    corpus.write_text(corpus.read_text() + json.dumps({"_id": "x", "text": "hens"}) + "\n")
    with pytest.raises(SystemExit, match="holds embeddings of other texts"):
        cache(monkeypatch, path, folders)
    with pytest.raises(SystemExit, match="is there and no cache of embeddings"):
        cache(monkeypatch, folders[0], folders)
    assert corpus.is_file()
    (folders[1] / "modules.json").unlink()
    with pytest.raises(SystemExit, match="it is no sentence-transformers model"):
        cache(monkeypatch, tmp_path / "new", folders)
