"""Folders are searched where they lie, by indexes that are built once and never of other texts."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from sparton.encoded import EncodedTexts, delete_texts, encode_collection, indexes, open_encoded
from sparton.evaluation import load_retriever
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.indexes import compression, inverted
from sparton.retrieval.indexes.compression import CompressedIndexBuilder
from sparton.retrieval.indexes.exact import exact_index
from sparton.retrieval.indexes.inverted import InvertedIndex, inverted_index
from sparton.retrieval.indexes.maxsim import MultiVectorIndex
from sparton.retrieval.indexes.protocols import Found
from sparton.retrieval.storing import VECTOR_DTYPES
from tests.encoded.problems import growth, make_texts, save_model
from tests.engines.problems import write_encoded

TEXTS, MORE = make_texts(50), make_texts(20, seed=1)
BUILDERS = {"exact": exact_index, "compressed": CompressedIndexBuilder(nbits=4)}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_model(folder / kind, kind) for kind in ("splade", "colbert", "joint")}


def encoded(model: Path, output: Path, texts=TEXTS, **settings: object) -> EncodedTexts:
    settings = {"rows_per_shard": 16, "progress": False, "name": str(model)} | settings
    return encode_collection(*load_retriever(model), texts, output, **settings)


def asked(model: Path) -> Representations:
    return encode_texts(*load_retriever(model), make_texts(9, seed=2).take(range(8)).texts, "query")


def assert_found(ours: Found, theirs: Found) -> None:
    np.testing.assert_array_equal(ours.rows, theirs.rows)
    np.testing.assert_array_equal(ours.scores, theirs.scores)


@pytest.mark.parametrize("dtype", VECTOR_DTYPES)
def test_token_vectors_of_every_dtype_are_read_as_they_were_stored(dtype, models, tmp_path):
    found = encoded(models["colbert"], tmp_path / "docs", vector_dtype=dtype, rows_per_shard=64)
    texts = TEXTS.take(range(50)).texts
    whole = encode_texts(
        *load_retriever(models["colbert"]), texts, "document", vector_dtype=dtype
    ).tokens
    read = open_encoded(tmp_path / "docs").representations().tokens
    assert read.values.dtype == getattr(torch, dtype)
    assert torch.equal(read.restored().values, whole.restored().values)
    assert (read.scales is not None) == (dtype == "float8_e4m3fn")
    other = VECTOR_DTYPES[VECTOR_DTYPES.index(dtype) - 1]
    with pytest.raises(ValueError, match=f"vector_dtype='{dtype}' and not {other}"):
        encoded(models["colbert"], tmp_path / "docs", vector_dtype=other, rows_per_shard=64)
    assert found.facts.settings.vector_dtype == dtype


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize(("kind", "dtype"), [
    ("splade", "float16"), ("colbert", "float16"), ("colbert", "float8_e4m3fn"),
    ("joint", "float16"),
])  # fmt: skip
def test_a_folder_is_searched_as_one_piece_in_memory(kind, dtype, build, models, tmp_path):
    if (kind, build) == ("splade", "compressed"):
        pytest.skip("no token vectors")
    make = BUILDERS[build]
    queries = asked(models[kind])
    found = encoded(models[kind], tmp_path / "docs", vector_dtype=dtype)
    for deleted in ([], ["0-0", "0-7", "0-8", "0-31"]):
        if deleted:
            found = delete_texts(tmp_path / "docs", deleted)
        ours = make(found.documents(), "cpu", rerank_depth=9).search(queries, 60)
        held = make(found.representations(), "cpu", rerank_depth=9)
        assert_found(ours, held.search(queries, 60))
        assert len(found) == 50 - len(deleted)
        again = make(open_encoded(tmp_path / "docs").documents(), "cpu", rerank_depth=9)
        assert_found(again.search(queries, 60), ours)
    whole = make(encoded(models[kind], tmp_path / "all").representations(), "cpu", rerank_depth=9)
    found = whole.search(queries, 60).rows[:, : ours.rows.shape[1]]
    assert (found != ours.rows).any(), "deletion is seen"


def never(*_: object, **__: object) -> None:
    raise AssertionError("built again")


@pytest.mark.parametrize(
    ("kind", "build", "place", "names"),
    [
        ("splade", "exact", (inverted, "invert"), {"inverted-cpu"}),
        ("colbert", "exact", (indexes, "save_file"), set()),
        ("colbert", "compressed", (compression, "train_codec"), {"compressed-4-bits-cpu"}),
        ("joint", "compressed", (compression, "train_codec"),
         {"compressed-4-bits-cpu", "inverted-cpu"}),
    ],
)  # fmt: skip
def test_an_index_is_built_once_and_again_after_changes(
    kind, build, place, names, models, tmp_path, monkeypatch
):
    docs, queries = tmp_path / "docs", asked(models[kind])

    def search() -> Found:
        return BUILDERS[build](open_encoded(docs).documents(), "cpu", rerank_depth=9).search(
            queries, 60
        )

    encoded(models[kind], docs)
    first = search()
    assert {path.stem for path in (docs / "indexes").glob("*")} == names
    with monkeypatch.context() as patched:
        patched.setattr(*place, never)
        assert_found(search(), first)
    encoded(models[kind], docs, MORE, append=True)
    if names:
        with monkeypatch.context() as patched:
            patched.setattr(*place, never)
            with pytest.raises(AssertionError, match="built again"):
                search()
    both = search()
    assert (both.rows >= 50).any() and not (first.rows >= 50).any()
    delete_texts(docs, ["0-3"])
    assert_found(
        search(),
        BUILDERS[build](open_encoded(docs).representations(), "cpu", rerank_depth=9).search(
            queries, 60
        ),
    )
    assert {path.stem for path in (docs / "indexes").glob("*")} == names
    assert not list(docs.rglob(".*")), "nothing is left of what was in the making"


def test_what_is_stale_does_not_stay_on_the_disk(models, tmp_path):
    docs = tmp_path / "docs"
    documents = encoded(models["colbert"], docs).documents()
    for nbits in (2, 4):
        CompressedIndexBuilder(nbits=nbits)(documents)
    names = {f"compressed-{nbits}-bits-cpu.safetensors" for nbits in (2, 4)}
    assert {path.name for path in (docs / "indexes").iterdir()} == names
    CompressedIndexBuilder(nbits=2)(delete_texts(docs, ["0-1"]).documents())
    left = {path.name for path in (docs / "indexes").iterdir()}
    assert left == {"compressed-2-bits-cpu.safetensors"}


@pytest.mark.parametrize("damage", ["flipped", "truncated", "nothing said"])
def test_a_damaged_index_is_refused_by_its_name(damage, models, tmp_path):
    docs = tmp_path / "docs"
    documents = encoded(models["splade"], docs).documents()
    inverted_index(documents, "cpu")
    path = docs / "indexes" / "inverted-cpu.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-5] ^= 1
    path.write_bytes(
        {"flipped": content, "truncated": content[:-9], "nothing said": b"\2" + b"\0" * 7 + b"{}"}[
            damage
        ]
    )
    with pytest.raises(ValueError, match=r"inverted-cpu.safetensors is damaged .* built again"):
        inverted_index(open_encoded(docs).documents(), "cpu")
    path.unlink()
    inverted_index(open_encoded(docs).documents(), "cpu")


def test_a_read_only_folder_is_searched_without_keeping(models, tmp_path, monkeypatch, caplog):
    docs = tmp_path / "docs"
    found, queries = encoded(models["splade"], docs), asked(models["splade"])
    monkeypatch.setattr(indexes.os, "access", lambda path, mode: False)
    ours = inverted_index(found.documents(), "cpu").search(queries, 9)
    assert "is read-only: its index is built again each time" in caplog.text
    assert not (docs / "indexes").exists()
    assert_found(ours, exact_index(found.representations()).search(queries, 9))


TEXTS_AT_ONCE, SHARDS, TERMS, TOKENS, WIDTH = 1024, 8, 1024, 64, 64


def large_folder(folder: Path) -> None:
    """48 MiB of postings, and 64 MiB of token vectors in 16 bits."""
    number = TEXTS_AT_ONCE * SHARDS
    generator = torch.Generator().manual_seed(0)
    terms = torch.arange(TERMS, dtype=torch.int32).repeat(number)
    sparse = SparseVectors(
        torch.rand(len(terms), generator=generator), terms,
        torch.arange(number + 1) * TERMS, TERMS,
    )  # fmt: skip
    tokens = TokenVectors(
        torch.randn(number * TOKENS, WIDTH, generator=generator).half(),
        torch.arange(number + 1) * TOKENS,
    )
    ids = [str(row) for row in range(number)]
    write_encoded(folder, Representations(sparse, tokens), ids, TEXTS_AT_ONCE)


def search_sparse(docs: EncodedTexts, queries: Representations) -> Found:
    return inverted_index(docs.documents().only(frozenset({"sparse"})), "cpu").search(queries, 10)


def search_sparse_in_memory(docs: EncodedTexts, queries: Representations) -> Found:
    return InvertedIndex(docs.representations().sparse).search(queries, 10)


def search_tokens(docs: EncodedTexts, queries: Representations) -> Found:
    held = docs.documents().only(frozenset({"tokens"}))
    return MultiVectorIndex(held.tokens, chunk_tokens=2**12).search(queries, 10)


def search_tokens_in_memory(docs: EncodedTexts, queries: Representations) -> Found:
    held = docs.representations().tokens
    return MultiVectorIndex(held, chunk_tokens=2**12).search(queries, 10)


def measured(search: Callable, folder: Path, small: Path) -> tuple[int, Found]:
    """By how much the memory of this process grows in a search, compiled code apart."""
    torch.set_num_threads(1)
    opened = open_encoded(small)
    queries = opened.representations().slice(0, 2)
    search(opened, queries)
    with growth() as grown:
        found = search(open_encoded(folder), queries)
    return grown[0], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "in_memory", "mib"),
    [(search_sparse, search_sparse_in_memory, 48), (search_tokens, search_tokens_in_memory, 64)],
)
def test_memory_does_not_grow_with_the_folder(ours, in_memory, mib, tmp_path):
    folder, small = tmp_path / "docs", tmp_path / "small"
    large_folder(folder)
    first = open_encoded(folder).representations().slice(0, 100)
    write_encoded(small, first, [str(row) for row in range(100)], 50)
    found = {}
    for search in (ours, in_memory):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found[search] = pool.submit(measured, search, folder, small).result()
    assert found[ours][0] < mib * 2**20 / 4, found
    assert found[in_memory][0] > mib * 2**20, found
    assert_found(found[ours][1], found[in_memory][1])
