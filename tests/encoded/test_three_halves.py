"""Folders with sparse, token and dense vectors: searched by the weighted sum of their scores."""

from pathlib import Path

import pytest
import torch

import sparton
from sparton.cli.encoding import _summary
from sparton.encoded import delete_texts, encode_collection, open_encoded
from sparton.kernels.maxsim import maxsim_reference
from sparton.pipelines.mining.miners import _read_slab, _write_slab
from sparton.representations import Representations
from sparton.retrieval.indexes.compression import CompressedIndexBuilder
from sparton.retriever import Retriever
from tests.encoded.problems import WEIGHTS, make_texts, save_model

TEXTS, QUERIES = make_texts(30), ["w3 w4 w5", "w17", "w40 w2"]


@pytest.fixture(scope="module")
def retriever(tmp_path_factory) -> Retriever:
    return sparton.load(save_model(tmp_path_factory.mktemp("model") / "three", "three"))


def encoded(retriever: Retriever, output: Path, **settings: object) -> Path:
    parts = retriever.encoder, retriever.tokenizer, TEXTS, output
    encode_collection(*parts, rows_per_shard=8, progress=False, **settings)
    return output


def summed(queries: Representations, documents: Representations) -> torch.Tensor:
    """The weighted sums of all scores, fp64."""
    sparse = queries.sparse.dense().double() @ documents.sparse.dense().double().T
    dense = queries.dense.values.double() @ documents.dense.values.double().T
    bounds = queries.tokens.cu_seqlens, documents.tokens.cu_seqlens
    tokens = maxsim_reference(
        queries.tokens.values.double(), documents.tokens.values.double(), *bounds, None, None
    )
    weights = WEIGHTS["sparse"], WEIGHTS["tokens"], WEIGHTS["dense"]
    return sum(w * scores for w, scores in zip(weights, (sparse, tokens, dense), strict=True))


def test_a_folder_is_searched_as_its_texts_are(retriever, tmp_path):
    folder = encoded(retriever, tmp_path / "docs", vector_dtype="float32")
    texts = TEXTS.take(range(30))
    queries, documents = (
        retriever.encode(each, side, vector_dtype="float32")
        for each, side in ((QUERIES, "query"), (texts.texts, "document"))
    )
    assert queries.score_weights == WEIGHTS and not documents.score_weights
    truth = summed(queries, documents)
    torch.testing.assert_close(
        retriever.similarity(queries, documents).double(), truth, rtol=1e-5, atol=1e-5
    )
    unweighted = retriever.similarity(queries._replace(score_weights={}), documents)
    assert not torch.allclose(unweighted.double(), truth, atol=0.1)
    delete_texts(folder, texts.ids[9:11])
    kept = [row for row in range(30) if row not in (9, 10)]
    for row, hits in enumerate(retriever.index(folder).search(QUERIES, 28)):
        best = sorted(kept, key=lambda each: -truth[row, each])
        assert [hit.id for hit in hits] == [texts.ids[each] for each in best]
        for hit, each in zip(hits, best, strict=True):
            assert hit.score == pytest.approx(truth[row, each].item(), abs=1e-4)
    assert " and a dense vector in " in _summary(open_encoded(folder))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_dense_vectors_are_stored_as_token_vectors_are(dtype, retriever, tmp_path):
    folder = encoded(retriever, tmp_path / "docs", vector_dtype=dtype)
    texts = TEXTS.take(range(30)).texts
    read = open_encoded(folder).representations().dense
    whole = retriever.encode_documents(texts, vector_dtype=dtype).dense
    exact = retriever.encode_documents(texts, vector_dtype="float32").dense
    assert read.values.dtype == getattr(torch, dtype)
    assert torch.equal(read.restored().values, whole.restored().values)
    gap = (read.restored().values - exact.values).abs().max()
    assert 0 < gap < (2**-8 if dtype == "bfloat16" else 2**-4)


def test_a_half_alone_and_an_index_that_would_pass_over_it(retriever, tmp_path):
    folder = encoded(retriever, tmp_path / "dense", kinds=["dense"], vector_dtype="float32")
    dense = [
        retriever.encode(each, side, vector_dtype="float32").dense.values
        for each, side in ((QUERIES, "query"), (TEXTS.take(range(30)).texts, "document"))
    ]
    best = (dense[0] @ dense[1].T).max(dim=1).values
    hits = retriever.index(folder).search(QUERIES, 1)
    assert [hit.score for (hit,) in hits] == pytest.approx(best.tolist(), abs=1e-5)
    whole = encoded(retriever, tmp_path / "docs")
    with pytest.raises(ValueError, match="a compressed index does not compare dense vectors"):
        retriever.index(whole, build=CompressedIndexBuilder(nbits=4))


def test_what_is_mined_is_kept_with_all_halves(retriever, tmp_path):
    texts = retriever.encode_documents(TEXTS.take(range(5)).texts)
    _write_slab(tmp_path / "slab.safetensors", texts)
    again = _read_slab(tmp_path / "slab.safetensors")
    for kind in ("sparse", "tokens", "dense"):
        for one, other in zip(getattr(texts, kind)[:3], getattr(again, kind)[:3], strict=True):
            assert one is other is None or torch.equal(one, other)
