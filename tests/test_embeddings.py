"""Texts to rows and rows to embeddings, without the function that writes them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sparton.embedding_files import CacheFacts, seal_cache
from sparton.embeddings import EmbeddingTable, TextRows, text_keys
from sparton.types import TextForm

QUERIES = ["one", "two", "three"]
DOCUMENTS = ["two", "four", ""]
VALUES = np.arange(12, dtype=np.float16).reshape(6, 2)
FACTS = CacheFacts(3, 8, 12, "mean", True, "", "", "digest")


@pytest.fixture
def folder(tmp_path) -> Path:
    np.save(tmp_path / "embeddings.npy", VALUES)
    np.save(tmp_path / "keys.npy", text_keys(QUERIES + DOCUMENTS))
    (tmp_path / "cache.json").write_text(json.dumps(FACTS._asdict()))
    (tmp_path / "progress.json").write_text('{"rows": 6}')
    seal_cache(tmp_path)
    return tmp_path


@pytest.mark.parametrize("on_device", [False, True])
def test_each_side_finds_its_own_rows(folder, on_device):
    rows, table = TextRows(folder), EmbeddingTable(folder, on_device=on_device)
    queries = rows.queries(["three", "two", "two"])
    documents = rows.documents(["", "two"])
    assert queries.input_ids.tolist() == [2, 1, 1] and documents.input_ids.tolist() == [5, 3]
    assert queries.cu_seqlens.tolist() == [0, 1, 2, 3] and queries.max_seqlen == 1
    assert queries.cu_seqlens.dtype == torch.int32 and not queries.position_ids.any()
    found = table.take(documents.input_ids)
    assert found.dtype == torch.float32 and found.tolist() == [[10, 11], [6, 7]]
    assert queries.select(1, 3).input_ids.tolist() == [1, 1]


def test_keys_do_not_depend_on_the_machine():
    assert text_keys(["", "a"]).tolist() == [13020603013274838756, 3405396810240292928]
    assert text_keys([]).shape == (0,)


def test_half_of_a_surrogate_pair_has_a_key():
    assert len(set(text_keys(["\ud800", "\udfff", "?"]).tolist())) == 3


def test_texts_that_were_not_embedded_are_named(folder):
    rows = TextRows(folder)
    with pytest.raises(ValueError, match=r"no embedding of the query 'four': give .*cache_emb"):
        rows.queries(["one", "four"])
    with pytest.raises(ValueError, match="no embedding of the document 'one'"):
        rows.documents(["one"])
    np.save(folder / "keys.npy", text_keys([]))
    np.save(folder / "embeddings.npy", VALUES[:0])
    (folder / "cache.json").write_text(json.dumps(FACTS._replace(queries=0)._asdict()))
    (folder / "progress.json").write_text('{"rows": 0}')
    seal_cache(folder)
    with pytest.raises(ValueError, match="no embedding of the query 'one'"):
        TextRows(folder).queries(["one"])


def test_other_lengths_than_those_of_the_cache_are_refused(folder):
    TextRows(folder).check_lengths(8, 12)
    message = "query_length=64 and document_length=12: set these to 8 and 12"
    with pytest.raises(ValueError, match=message):
        TextRows(folder).check_lengths(64, 12)


def test_what_is_no_cache_or_not_complete_is_refused(folder, tmp_path):
    for opener in (TextRows, EmbeddingTable):
        with pytest.raises(FileNotFoundError, match=r"cache\.json is missing"):
            opener(tmp_path / "nowhere")
    (folder / "progress.json").write_text('{"rows": 4}')
    for opener in (TextRows, EmbeddingTable):
        with pytest.raises(ValueError, match="holds 4 of 6 embeddings"):
            opener(folder)


def test_embeddings_have_one_form(folder):
    rows = TextRows(folder)
    same = TextForm(query_length=8, document_length=12, query_prompt=FACTS.query_prompt)
    for forms in (same, [same, TextForm()]):
        assert rows.queries(["three", "two"], forms).input_ids.tolist() == [2, 1]
        assert rows.documents(["", "two"], forms).input_ids.tolist() == [5, 3]
    with pytest.raises(ValueError, match="read with query_length=8, not with 9: leave that out"):
        rows.queries(["three", "two"], [same, TextForm(query_length=9)])
    with pytest.raises(ValueError, match=r"read with document_prompt='.*', not with 'other: '"):
        rows.documents(["two"], TextForm(document_prompt="other: "))
