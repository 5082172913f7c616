"""Exact search by MaxSim against the reference. N documents, Q queries, E width, C candidates."""

import itertools

import numpy as np
import pytest
import torch

from sparton.kernels.maxsim import maxsim_reference
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes import maxsim
from sparton.retrieval.indexes.documents import TokenParts
from sparton.retrieval.indexes.maxsim import MultiVectorIndex, maxsim_scores, resident
from sparton.retrieval.metrics import evaluate_run
from sparton.retrieval.run import Run
from sparton.retrieval.storing import store_tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LIMITS = pytest.mark.parametrize(
    "limits",
    [{}, {"chunk_tokens": 30}, {"chunk_tokens": 1}],
    ids=["one_chunk", "chunks_of_30_tokens", "chunks_of_one_document"],
)


def random_vectors(texts: int, seed: int, *, whole: bool = True, width: int = 8) -> TokenVectors:
    """Texts of 0 to 8 tokens, a third of them masked. Sums of products of small whole numbers are
    exact in every precision, whatever their order, and full of ties."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 9, (texts,), generator=generator)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    shape = int(bounds[-1]), width
    values = torch.randint(-2, 3, shape, generator=generator).float()
    if not whole:
        values = torch.nn.functional.normalize(torch.randn(shape, generator=generator), dim=1)
    return TokenVectors(values, bounds, torch.rand(shape[0], generator=generator) < 0.67)


def reference(queries: TokenVectors, documents: TokenVectors) -> np.ndarray:
    """Scores ``[Q, N]`` in fp64; NaN where a side has no token that takes part."""
    scores = maxsim_reference(
        queries.values.double(), documents.values.double(), queries.cu_seqlens,
        documents.cu_seqlens, queries.mask, documents.mask,
    ).numpy()  # fmt: skip
    for side, axis in ((queries, 0), (documents, 1)):
        empty = (store_tokens(side).lengths == 0).numpy()
        scores[(empty, slice(None)) if axis == 0 else (slice(None), empty)] = np.nan
    return scores


def best(
    scores: np.ndarray, k: int, exclude: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What the index documents: ties by the lower row, padded by 0 and -1."""
    k = min(k, scores.shape[1])
    found, rows = np.zeros((len(scores), k)), np.full((len(scores), k), -1)
    for query, own in enumerate(scores.copy()):
        if exclude is not None:
            own[exclude[query][exclude[query] >= 0]] = np.nan
        order = np.lexsort((np.arange(len(own)), -own))
        order = order[~np.isnan(own[order])][:k]
        found[query, : len(order)], rows[query, : len(order)] = own[order], order
    return found, rows


def texts_of(vectors: TokenVectors, dtype: str = "float16") -> Representations:
    return Representations(tokens=store_tokens(vectors, dtype))


def make_index(documents: Representations, device: str, **limits: int) -> MultiVectorIndex:
    return MultiVectorIndex(documents.tokens, device, **limits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 10, 57, 200])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@LIMITS
def test_search_equals_reference_with_ties_masks_and_empty_texts(device, k, dtype, limits):
    documents, queries = random_vectors(57, seed=0), random_vectors(140, seed=1)
    index = make_index(texts_of(documents, dtype), device, **limits)
    scores, rows = index.search(texts_of(queries, dtype), k)
    truth = reference(queries, documents)
    expected_scores, expected_rows = best(truth, k)
    assert np.isnan(truth).all(axis=0).any(), "the case must hold documents without tokens"
    assert np.isnan(truth).all(axis=1).any(), "the case must hold queries without tokens"
    assert (truth < 0).any(), "the case must hold negative scores"
    assert (np.diff(expected_scores[:, :2]) == 0).any() or k == 1, "the case must hold ties"
    assert (scores.dtype, rows.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(scores, expected_scores)
    np.testing.assert_array_equal(rows, expected_rows)


@pytest.mark.parametrize("device", DEVICES)
def test_search_equals_reference_on_unit_vectors(device):
    documents = random_vectors(300, seed=2, whole=False, width=32)
    queries = random_vectors(40, seed=3, whole=False, width=32)
    index = make_index(texts_of(documents, "float32"), device, chunk_tokens=200)
    scores, rows = index.search(texts_of(queries, "float32"), 20)

    def agrees(documents: TokenVectors) -> bool:
        expected, expected_rows = best(reference(queries, documents), 20)
        return np.allclose(scores, expected, rtol=1e-5) and np.array_equal(rows, expected_rows)

    assert agrees(documents)
    assert not agrees(documents._replace(values=documents.values * 1.0001)), "tolerance too wide"
    again = index.search(texts_of(queries, "float32"), 20)
    np.testing.assert_array_equal(again[0], scores)


@pytest.mark.parametrize("device", DEVICES)
@LIMITS
def test_exclude_leaves_out_documents_of_each_query(device, limits):
    texts = random_vectors(50, seed=5)
    own = np.stack([np.arange(50), np.arange(49, -1, -1)], axis=1)
    own[::3, 0] = -1
    index = make_index(texts_of(texts), device, **limits)
    for k in (3, 60):
        scores, rows = index.search(texts_of(texts), k, exclude=own)
        expected_scores, expected_rows = best(reference(texts, texts), k, own)
        np.testing.assert_array_equal(scores, expected_scores)
        np.testing.assert_array_equal(rows, expected_rows)
    assert any(row in found for row, found in enumerate(rows)), "only what is named is left out"


def test_index_without_tokens_and_search_without_queries():
    no_vectors = torch.zeros(0, 8, dtype=torch.float16)
    nothing, silent = (
        Representations(tokens=TokenVectors(no_vectors, torch.zeros(count, dtype=torch.int64)))
        for count in (1, 4)
    )
    texts = texts_of(random_vectors(5, seed=6))
    for documents in (nothing, silent):
        scores, rows = make_index(documents, "cpu").search(texts, 3)
        assert rows.shape == scores.shape == (5, min(3, len(documents.tokens.lengths)))
        assert (rows == -1).all()
        assert (scores == 0).all()
        assert make_index(texts, "cpu").search(documents, 3).rows.shape == (documents.num_texts, 3)
    candidates = np.array([[0, 2, -1]] * 5)
    assert (make_index(silent, "cpu").rerank(texts, candidates)[1] == -1).all()
    assert make_index(nothing, "cpu").rerank(texts, np.zeros((5, 0), np.int64))[1].shape == (5, 0)
    assert (make_index(nothing, "cpu").rerank(texts, np.full((5, 2), -1))[1] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pairs", [2**16, 4])
@LIMITS
def test_rerank_equals_search_among_the_candidates(device, pairs, limits, monkeypatch):
    monkeypatch.setattr(maxsim, "_PAIRS_AT_ONCE", pairs)
    documents, queries = random_vectors(57, seed=7), random_vectors(30, seed=8)
    rng = np.random.default_rng(0)
    candidates = np.array([rng.permutation(57)[:21] for _ in range(30)])
    candidates[rng.random(candidates.shape) < 0.2] = -1
    index = make_index(texts_of(documents), device, **limits)
    scores, rows = index.rerank(texts_of(queries), candidates)
    everything, truth = reference(queries, documents), np.full((30, 57), np.nan)
    for query, chosen in enumerate(candidates):
        chosen = chosen[chosen >= 0]
        truth[query, chosen] = everything[query, chosen]
    expected_scores, expected_rows = best(truth, 21)
    np.testing.assert_array_equal(scores, expected_scores)
    np.testing.assert_array_equal(rows, expected_rows)
    all_rows = np.tile(np.arange(57), (30, 1))
    reranked, searched = (
        index.rerank(texts_of(queries), all_rows),
        index.search(texts_of(queries), 57),
    )
    for found, expected in zip(reranked, searched, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_scores_of_candidates_keep_their_places():
    documents, queries = random_vectors(20, seed=9), random_vectors(6, seed=10)
    candidates = np.random.default_rng(1).integers(-1, 20, (6, 9))
    scores = maxsim_scores(store_tokens(queries), store_tokens(documents), candidates)
    truth = np.nan_to_num(reference(queries, documents))
    expected = np.where(candidates < 0, 0, np.take_along_axis(truth, candidates, axis=1))
    np.testing.assert_array_equal(scores, expected)


def test_on_a_cpu_the_candidates_of_a_query_share_a_product(monkeypatch):
    """And nothing is widened of the documents that nobody asked for."""
    documents, queries = (store_tokens(random_vectors(n, n)) for n in (60, 3))
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    candidates = rows[:45].view(3, 15).numpy()
    real, seen = maxsim.maxsim_varlen, []

    def noted(left, right, query_bounds, document_bounds, **settings):
        seen.append((len(query_bounds), len(document_bounds), right.dtype))
        return real(left, right, query_bounds, document_bounds, **settings)

    monkeypatch.setattr(maxsim, "maxsim_varlen", noted)
    maxsim_scores(queries, documents, candidates)
    assert seen == [(2, 16, torch.float16)] * 3


@pytest.mark.slow
def test_half_precision_leaves_the_quality_of_a_ranking_as_it_is():
    documents = random_vectors(400, seed=11, whole=False, width=64)
    queries = random_vectors(60, seed=12, whole=False, width=64)
    ids = [[f"{side}{row}" for row in range(n)] for side, n in (("q", 60), ("d", 400))]
    runs = {}
    for dtype in ("float16", "float32"):
        index = make_index(texts_of(documents, dtype), "cpu")
        scores, rows = index.search(texts_of(queries, dtype), 100)
        runs[dtype] = Run(*ids, rows, scores)
    half, single = runs["float16"], runs["float32"]
    assert (half.scores != single.scores).any()
    np.testing.assert_allclose(half.scores, single.scores, atol=8 * 2**-10)
    qrels = {
        query: {document: place % 3 for place, (document, _) in enumerate(found[2:30])}
        for query, found in single.rankings()
        if len(found) > 30
    }
    ndcg = [evaluate_run(qrels, run, ["ndcg@10"])["ndcg@10"] for run in (half, single)]
    assert ndcg[0] == pytest.approx(ndcg[1], abs=1e-3)
    reversed_run = single._replace(rows=single.rows[:, ::-1])
    assert abs(evaluate_run(qrels, reversed_run, ["ndcg@10"])["ndcg@10"] - ndcg[1]) > 0.1


def test_texts_can_be_taken_cut_out_and_joined():
    texts = store_tokens(random_vectors(12, seed=13))

    def content(vectors: TokenVectors) -> list:
        spans = itertools.pairwise(vectors.cu_seqlens.tolist())
        return [vectors.values[first:last].tolist() for first, last in spans]

    pieces = content(texts)
    order = torch.tensor([3, 3, 0, -1, 11])
    assert content(texts.take(order)) == [pieces[3], pieces[3], pieces[0], [], pieces[11]]
    assert content(texts.slice(2, 5)) == pieces[2:5]
    assert content(TokenVectors.concatenate([texts.slice(0, 4), texts.slice(4, 12)])) == pieces
    assert texts.mean_tokens == sum(map(len, pieces)) / 12
    assert texts.slice(0, 5).values.data_ptr() == texts.values.data_ptr()


def test_what_cannot_be_compared_is_refused():
    texts = texts_of(random_vectors(5, seed=14))
    index = make_index(texts, "cpu")
    with pytest.raises(ValueError, match="float32 vectors of 8, documents float16 v"):
        index.search(texts_of(random_vectors(5, seed=14), "float32"), 3)
    with pytest.raises(ValueError, match="float16 vectors of 4, documents float16 v"):
        index.rerank(texts_of(random_vectors(5, seed=14, width=4)), np.zeros((5, 1), np.int64))
    with pytest.raises(ValueError, match="k is 0"):
        index.search(texts, 0)
    with pytest.raises(ValueError, match=r"exclude has the shape \(4,\)"):
        index.search(texts, 3, exclude=np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="the same candidate twice"):
        index.rerank(texts, np.array([[0, 1, 0]] * 5))
    with pytest.raises(ValueError, match=r"candidates have the shape \(4, 1\)"):
        index.rerank(texts, np.zeros((4, 1), np.int64))
    with pytest.raises(ValueError, match="candidates from 0 to 5"):
        index.rerank(texts, np.array([[5, 0]] * 5))


def test_progress_is_shown_only_when_asked_for(capsys):
    texts = texts_of(random_vectors(40, seed=15))
    index = make_index(texts, "cpu", chunk_tokens=30)
    index.search(texts, 3)
    assert capsys.readouterr().err == ""
    index.search(texts, 3, progress="toy: search")
    index.rerank(texts, np.zeros((40, 1), np.int64), progress="toy: rerank")
    err = capsys.readouterr().err
    filled = int((texts.tokens.lengths > 0).sum())
    assert "toy: search" in err
    assert f"{filled}/{filled}" in err
    assert "toy: rerank" in err
    assert "40/40" in err


def in_parts(documents: TokenVectors, *ends: int) -> TokenParts:
    bounds = [0, *ends, documents.num_texts]
    return TokenParts([documents.slice(*each) for each in itertools.pairwise(bounds)])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float8_e4m3fn"])
def test_parts_are_held_in_one(dtype):
    documents = store_tokens(random_vectors(40, seed=4, whole=False), dtype)
    parts = in_parts(documents, 11, 12, 30)
    held = parts.held_on(torch.device("cpu"))
    for start, stop in ((0, 40), (10, 31), (12, 13)):
        one, other = held.slice(start, stop), parts.slice(start, stop)
        assert torch.equal(one.restored().values, other.restored().values)
        assert torch.equal(one.cu_seqlens, other.cu_seqlens)
    assert held.nbytes == parts.nbytes
    assert held.slice(0, 40).values.data_ptr() == held.slice(0, 1).values.data_ptr()


def test_a_gpu_holds_documents_that_it_has_room_for(monkeypatch):
    documents = in_parts(store_tokens(random_vectors(40, seed=4)), 20)
    gpu, held = torch.device("cuda"), object()
    monkeypatch.setattr(TokenParts, "held_on", lambda self, device: held)
    for free, kept in ((2 * documents.nbytes, True), (2 * documents.nbytes - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 0))
        assert resident(documents, gpu) is (held if kept else documents)
    assert resident(documents, torch.device("cpu")) is documents


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_documents_on_a_gpu_are_found_as_those_on_the_host(dtype, monkeypatch):
    documents = store_tokens(random_vectors(400, seed=5), dtype)
    queries = texts_of(random_vectors(9, seed=6))
    there = MultiVectorIndex(in_parts(documents, 100, 250), "cuda")
    monkeypatch.setattr(maxsim, "RESIDENT", 0.0)
    host = MultiVectorIndex(in_parts(documents, 100, 250), "cuda")
    assert (there.documents.device.type, host.documents.device.type) == ("cuda", "cpu")
    for index in (there, host, there):  # once more: boundaries are kept
        for found, expected in zip(index.search(queries, 20), host.search(queries, 20)):
            np.testing.assert_array_equal(found, expected)
    candidates = host.search(queries, 20).rows
    for found, expected in zip(there.rerank(queries, candidates), host.rerank(queries, candidates)):
        np.testing.assert_array_equal(found, expected)
