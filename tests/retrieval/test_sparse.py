"""The sparse index against a dense matrix product. N documents, Q queries, V terms."""

import numpy as np
import pytest
import torch

from sparton.retrieval.sparse import SparseIndex, SparseRows, mean_flops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def small_integers(rows: int, terms: int, seed: int, density: float = 0.2) -> torch.Tensor:
    """Sums of products of these are exact in fp32, whatever their order, and full of ties."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 4, (rows, terms), generator=generator).float()
    return weights * (torch.rand(rows, terms, generator=generator) < density)


def to_dense(rows: SparseRows) -> np.ndarray:
    dense = np.zeros((rows.num_rows, rows.width), np.float32)
    dense[np.repeat(np.arange(rows.num_rows), rows.row_lengths), rows.indices] = rows.values
    return dense


def dense_search(
    queries: np.ndarray, documents: np.ndarray, k: int, exclude: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What the index documents: positive scores only, ties by the lower row, padded by 0 and -1."""
    scores = queries.astype(np.float64) @ documents.T.astype(np.float64)
    best = np.zeros((len(queries), k))
    rows = np.full((len(queries), k), -1)
    for query, row_scores in enumerate(scores):
        if exclude is not None and exclude[query] >= 0:
            row_scores[exclude[query]] = 0
        order = np.lexsort((np.arange(len(documents)), -row_scores))
        order = order[row_scores[order] > 0][:k]
        best[query, : len(order)], rows[query, : len(order)] = row_scores[order], order
    return best, rows


def make_index(documents: torch.Tensor, device: str, **limits: int) -> SparseIndex:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return SparseIndex(SparseRows.from_dense(documents), device, **limits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 10, 57, 200])
@pytest.mark.parametrize(
    "limits",
    [{}, {"chunk_documents": 7}, {"chunk_documents": 1}, {"chunk_weights": 40}],
    ids=["one_chunk", "chunks_of_7", "chunks_of_1", "chunks_of_40_weights"],
)
def test_search_equals_dense_product_with_ties(device, k, limits):
    documents, queries = small_integers(57, 30, seed=0), small_integers(131, 30, seed=1)
    scores, rows = make_index(documents, device, **limits).search(SparseRows.from_dense(queries), k)
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
    scores, rows = make_index(documents, device, chunk_documents=64).search(
        SparseRows.from_dense(queries), 20
    )

    def agrees(documents: torch.Tensor) -> bool:
        expected, expected_rows = dense_search(queries.numpy(), documents.numpy(), 20)
        return np.allclose(scores, expected, rtol=1e-6) and np.array_equal(rows, expected_rows)

    assert agrees(documents)
    documents[rows[0, 0], queries[0].argmax()] *= 1.00001
    assert not agrees(documents), "the tolerance must notice a single weight changed by 1e-5"


@pytest.mark.parametrize("device", DEVICES)
def test_exclude_leaves_out_one_document_per_query(device):
    documents = small_integers(50, 20, seed=5, density=0.5)
    own = np.arange(50)
    own[::3] = -1
    scores, rows = make_index(documents, device, chunk_documents=16).search(
        SparseRows.from_dense(documents), 50, exclude=own
    )
    expected_scores, expected_rows = dense_search(documents.numpy(), documents.numpy(), 50, own)
    np.testing.assert_array_equal(scores, expected_scores)
    np.testing.assert_array_equal(rows, expected_rows)
    assert (rows[1] != 1).all()
    assert (rows[0] == 0).any()


@pytest.mark.parametrize("device", DEVICES)
def test_empty_documents_and_queries_find_and_are_nothing(device):
    documents, queries = small_integers(9, 6, seed=6, density=0.6), torch.zeros(3, 6)
    documents[[0, 4, 8]] = 0
    queries[1] = 1
    scores, rows = make_index(documents, device, chunk_documents=1).search(
        SparseRows.from_dense(queries), 9
    )
    assert (rows[[0, 2]] == -1).all()
    assert (scores[[0, 2]] == 0).all()
    assert sorted(rows[1]) == [-1, -1, -1, 1, 2, 3, 5, 6, 7]


def test_index_without_documents_and_search_without_queries():
    nothing = SparseRows.from_dense(torch.zeros(0, 6))
    something = SparseRows.from_dense(torch.ones(2, 6))
    scores, rows = SparseIndex(nothing).search(something, 3)
    assert (rows == -1).all()
    assert rows.shape == scores.shape == (2, 3)
    assert SparseIndex(something).search(nothing, 3)[1].shape == (0, 3)


def test_search_leaves_its_input_as_it_was():
    rows = SparseRows.from_dense(small_integers(20, 10, seed=7))
    before = [array.copy() for array in rows[:3]]
    SparseIndex(rows).search(rows, 5, exclude=np.arange(20))
    for array, old in zip(rows[:3], before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_search_refuses_what_does_not_fit():
    index = SparseIndex(SparseRows.from_dense(torch.ones(4, 6)))
    with pytest.raises(ValueError, match="queries have 5 terms but the index has 6"):
        index.search(SparseRows.from_dense(torch.ones(1, 5)), 3)
    queries = SparseRows.from_dense(torch.ones(2, 6))
    with pytest.raises(ValueError, match="k is 0"):
        index.search(queries, 0)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        index.search(queries, 3, exclude=np.zeros(3, np.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_dense_round_trip(dtype):
    reps = small_integers(13, 17, seed=8).to(dtype)
    reps[[0, 5, 12]] = 0
    rows = SparseRows.from_dense(reps)
    np.testing.assert_array_equal(to_dense(rows), reps.float().numpy())
    assert (rows.indptr.dtype, rows.indices.dtype) == (np.int64, np.int32)
    assert rows.values.dtype == np.float32
    assert rows.mean_active_terms == pytest.approx((reps != 0).sum().item() / 13)


def test_concatenate_and_take_work_on_rows():
    dense = small_integers(20, 9, seed=9)
    dense[[3, 19]] = 0
    parts = [SparseRows.from_dense(part) for part in (dense[:3], dense[3:3], dense[3:19])]
    joined = SparseRows.concatenate([*parts, SparseRows.from_dense(dense[19:])])
    np.testing.assert_array_equal(to_dense(joined), dense.numpy())
    order = np.random.default_rng(0).permutation(20)
    np.testing.assert_array_equal(to_dense(joined.take(order)), dense.numpy()[order])
    np.testing.assert_array_equal(to_dense(joined.take(np.array([3, 3, 0]))), dense[[3, 3, 0]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_from_dense_names_the_row_that_is_not_finite(bad):
    reps = small_integers(6, 8, seed=10)
    reps[[2, 4]] = 0
    reps[4, 3] = bad
    with pytest.raises(ValueError, match=f"row 4 .* {bad}: the model diverged"):
        SparseRows.from_dense(reps)


def test_normalized_rows_have_length_1_and_their_dot_products_are_cosines():
    reps = torch.rand(6, 40, generator=torch.Generator().manual_seed(0)) * 100
    reps[reps < 60] = 0
    reps[[2, 5]] = 0
    reps[3] *= 1e-30  # whose squares fp32 does not have
    rows = SparseRows.from_dense(reps)
    unit = SparseRows.from_dense(
        torch.nn.functional.normalize(reps.double(), dim=1, eps=0).nan_to_num()
    )
    given = rows.normalized()
    np.testing.assert_array_equal(given.indptr, rows.indptr)
    np.testing.assert_array_equal(given.indices, rows.indices)
    np.testing.assert_allclose(given.values, unit.values, rtol=1e-6)
    assert given.values.dtype == np.float32 and given.row_lengths[[2, 5]].tolist() == [0, 0]
    assert rows.values.max() > 60 and len(rows.values) > 40
    assert SparseRows.from_dense(torch.zeros(0, 4)).normalized().num_rows == 0


def test_mean_flops_is_the_mean_number_of_shared_terms():
    queries, documents = small_integers(7, 12, seed=11), small_integers(31, 12, seed=12)
    shared = ((queries[:, None] != 0) & (documents[None] != 0)).sum(-1).double().mean().item()
    found = mean_flops(SparseRows.from_dense(queries), SparseRows.from_dense(documents))
    assert found == pytest.approx(shared, rel=1e-12)
    assert found > 0
