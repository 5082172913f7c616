"""The inverted index against a dense matrix product. N documents, Q queries, V terms."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch

from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations
from sparton.retrieval.indexes.inverted import InvertedIndex
from sparton.retrieval.storing import store_sparse

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def small_integers(rows: int, terms: int, seed: int, density: float = 0.2) -> torch.Tensor:
    """Sums of products of these are exact in fp32, whatever their order, and full of ties."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 4, (rows, terms), generator=generator).float()
    return weights * (torch.rand(rows, terms, generator=generator) < density)


def texts_of(weights: torch.Tensor) -> Representations:
    return Representations(store_sparse(weights))


def dense_search(
    queries: np.ndarray, documents: np.ndarray, k: int, exclude: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What the index documents: positive scores only, ties by the lower row, padded by 0 and -1."""
    scores = queries.astype(np.float64) @ documents.T.astype(np.float64)
    k = min(k, len(documents))
    best = np.zeros((len(queries), k))
    rows = np.full((len(queries), k), -1)
    for query, row_scores in enumerate(scores):
        if exclude is not None:
            row_scores[exclude[query][exclude[query] >= 0]] = 0
        order = np.lexsort((np.arange(len(documents)), -row_scores))
        order = order[row_scores[order] > 0][:k]
        best[query, : len(order)], rows[query, : len(order)] = row_scores[order], order
    return best, rows


def make_index(documents: torch.Tensor, device: str, block: int | None = None) -> InvertedIndex:
    return InvertedIndex(store_sparse(documents), device, block=block)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 10, 157, 200])
@pytest.mark.parametrize("block", [None, 64, 128])
def test_search_equals_dense_product_with_ties(device, k, block):
    documents, queries = small_integers(157, 30, seed=0), small_integers(131, 30, seed=1)
    scores, rows = make_index(documents, device, block).search(texts_of(queries), k)
    expected_scores, expected_rows = dense_search(queries.numpy(), documents.numpy(), k)
    assert (np.diff(expected_scores[:, :2]) == 0).any() or k == 1, "the case must hold ties"
    assert scores.dtype == np.float32
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(scores, expected_scores)
    np.testing.assert_array_equal(rows, expected_rows)


@pytest.mark.parametrize("device", DEVICES)
def test_search_equals_dense_product_on_real_weights(device):
    generator = torch.Generator().manual_seed(2)
    documents = torch.rand(300, 500, generator=generator) * small_integers(300, 500, 3, 0.1)
    queries = torch.rand(40, 500, generator=generator) * small_integers(40, 500, 4, 0.05)
    scores, rows = make_index(documents, device, block=64).search(texts_of(queries), 20)

    def agrees(documents: torch.Tensor) -> bool:
        expected, expected_rows = dense_search(queries.numpy(), documents.numpy(), 20)
        return np.allclose(scores, expected, rtol=1e-6) and np.array_equal(rows, expected_rows)

    assert agrees(documents)
    documents[rows[0, 0], queries[0].argmax()] *= 1.00001
    assert not agrees(documents), "the tolerance must notice a single weight changed by 1e-5"


@pytest.mark.parametrize("device", DEVICES)
def test_exclude_leaves_out_documents_of_each_query(device):
    documents = small_integers(150, 20, seed=5, density=0.5)
    own = np.stack([np.arange(150), np.arange(149, -1, -1)], axis=1)
    own[::3, 0] = -1
    scores, rows = make_index(documents, device, block=64).search(
        texts_of(documents), 150, exclude=own
    )
    expected_scores, expected_rows = dense_search(documents.numpy(), documents.numpy(), 150, own)
    np.testing.assert_array_equal(scores, expected_scores)
    np.testing.assert_array_equal(rows, expected_rows)
    assert (rows[1] != 1).all()
    assert (rows[0] == 0).any()


@pytest.mark.parametrize("device", DEVICES)
def test_empty_documents_and_queries_find_and_are_nothing(device):
    documents, queries = small_integers(9, 6, seed=6, density=0.6), torch.zeros(3, 6)
    documents[[0, 4, 8]] = 0
    queries[1] = 1
    scores, rows = make_index(documents, device).search(texts_of(queries), 9)
    assert (rows[[0, 2]] == -1).all()
    assert (scores[[0, 2]] == 0).all()
    assert sorted(rows[1]) == [-1, -1, -1, 1, 2, 3, 5, 6, 7]


def test_index_without_documents_and_search_without_queries():
    nothing, something = texts_of(torch.zeros(0, 6)), texts_of(torch.ones(2, 6))
    scores, rows = InvertedIndex(nothing.sparse).search(something, 3)
    assert rows.shape == scores.shape == (2, 0)
    assert InvertedIndex(something.sparse).search(nothing, 3).rows.shape == (0, 2)


@pytest.mark.parametrize("again", [lambda index: pickle.loads(pickle.dumps(index)), copy.deepcopy])
def test_a_copy_finds_the_same(again):
    queries, documents = small_integers(5, 40, seed=1), small_integers(300, 40, seed=2)
    index = InvertedIndex(store_sparse(documents), block=64)
    copied = again(index)
    found = copied.search(texts_of(queries), 7)
    scores, rows = dense_search(queries.numpy(), documents.numpy(), 7)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.scores, scores)
    assert copied.nbytes == index.nbytes


def test_search_leaves_its_input_as_it_was():
    texts = texts_of(small_integers(20, 10, seed=7))
    before = [tensor.clone() for tensor in texts.sparse[:3]]
    InvertedIndex(texts.sparse).search(texts, 5, exclude=np.arange(20)[:, None])
    for tensor, old in zip(texts.sparse[:3], before, strict=True):
        assert torch.equal(tensor, old)


def test_search_refuses_what_does_not_fit():
    index = make_index(torch.ones(4, 6), "cpu")
    with pytest.raises(ValueError, match="queries have 5 terms but the index has 6"):
        index.search(texts_of(torch.ones(1, 5)), 3)
    queries = texts_of(torch.ones(2, 6))
    with pytest.raises(ValueError, match="k is 0"):
        index.search(queries, 0)
    for shape in ((3, 1), (2,)):
        with pytest.raises(
            ValueError, match=re.escape(f"the shape {shape}, must be an array [Q, M")
        ):
            index.search(queries, 3, exclude=np.zeros(shape, np.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_vectors_are_those_given(dtype):
    reps = small_integers(13, 17, seed=8).to(dtype)
    reps[[0, 5, 12]] = 0
    vectors = store_sparse(reps)
    assert torch.equal(vectors.dense(), reps.float())
    assert (vectors.cu_seqlens.dtype, vectors.terms.dtype) == (torch.int64, torch.int32)
    assert vectors.values.dtype == torch.float32
    assert vectors.mean_entries == pytest.approx((reps != 0).sum().item() / 13)


def test_concatenate_and_take_work_on_rows():
    dense = small_integers(20, 9, seed=9)
    dense[[3, 19]] = 0
    parts = [store_sparse(part) for part in (dense[:3], dense[3:3], dense[3:19])]
    joined = SparseVectors.concatenate([*parts, store_sparse(dense[19:])])
    assert torch.equal(joined.dense(), dense)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(joined.take(order).dense(), dense[order])
    assert torch.equal(joined.take(torch.tensor([3, 3, 0])).dense(), dense[[3, 3, 0]])
    assert torch.equal(joined.slice(2, 5).dense(), dense[2:5])
    number = joined.num_vectors
    for start, stop in ((-2, number), (3, 2), (0, number + 1)):
        with pytest.raises(ValueError, match=f"{start} : {stop} of {number}: must be 0 <= start"):
            joined.slice(start, stop)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_storing_names_the_row_that_is_not_finite(bad):
    reps = small_integers(6, 8, seed=10)
    reps[[2, 4]] = 0
    reps[4, 3] = bad
    with pytest.raises(ValueError, match=f"row 4 .* {bad}: the model diverged"):
        store_sparse(reps)


def test_normalized_rows_have_length_1_and_their_dot_products_are_cosines():
    reps = torch.rand(6, 40, generator=torch.Generator().manual_seed(0)) * 100
    reps[reps < 60] = 0
    reps[[2, 5]] = 0
    reps[3] *= 1e-30  # whose squares fp32 does not have
    rows = store_sparse(reps)
    unit = store_sparse(torch.nn.functional.normalize(reps.double(), dim=1, eps=0).nan_to_num())
    given = rows.normalized()
    np.testing.assert_array_equal(given.cu_seqlens, rows.cu_seqlens)
    np.testing.assert_array_equal(given.terms, rows.terms)
    np.testing.assert_allclose(given.values, unit.values, rtol=1e-6)
    assert given.values.dtype == torch.float32 and given.lengths[[2, 5]].tolist() == [0, 0]
    assert rows.values.max() > 60 and len(rows.values) > 40
    assert store_sparse(torch.zeros(0, 4)).normalized().num_vectors == 0
