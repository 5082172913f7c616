"""One index over sparse vectors, token vectors, or both. N documents, Q queries."""

import numpy as np
import pytest
import torch

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes.compression import CompressedIndexBuilder
from sparton.retrieval.indexes.exact import exact_index, score_pairs
from sparton.retrieval.indexes.inverted import InvertedIndex
from sparton.retrieval.indexes.maxsim import MultiVectorIndex
from sparton.retrieval.indexes.seismic import SeismicIndexBuilder
from sparton.retrieval.storing import store_sparse, store_tokens


def texts(count: int, seed: int) -> Representations:
    """Both kinds of vectors, of small whole numbers; some texts have none."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 4, (count, 12), generator=generator).float()
    weights *= torch.rand(count, 12, generator=generator) < 0.3
    lengths = torch.randint(0, 5, (count,), generator=generator)
    cu_seqlens = cu_seqlens_of(lengths, torch.int32)
    values = torch.randint(-2, 3, (int(cu_seqlens[-1]), 4), generator=generator).float()
    return Representations(store_sparse(weights), store_tokens(TokenVectors(values, cu_seqlens)))


@pytest.fixture
def sides() -> tuple[Representations, Representations]:
    return texts(9, 0), texts(40, 1)


def test_each_kind_of_vectors_is_searched_by_its_own_index(sides):
    queries, documents = sides
    exclude = np.arange(9)[:, None]
    sparse = exact_index(Representations(documents.sparse)).search(
        Representations(queries.sparse), 7, exclude=exclude
    )
    tokens = exact_index(Representations(None, documents.tokens)).search(
        Representations(None, queries.tokens), 7, exclude=exclude
    )
    for found, expected in (
        (sparse, InvertedIndex(documents.sparse).search(queries, 7, exclude=exclude)),
        (tokens, MultiVectorIndex(documents.tokens).search(queries, 7, exclude=exclude)),
    ):
        for array, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize(("k", "depth"), [(5, 12), (12, 12), (30, 12), (3, 100)])
def test_with_both_maxsim_orders_what_sparse_vectors_find(sides, k, depth):
    queries, documents = sides
    exclude = np.arange(27).reshape(9, 3)
    index = exact_index(documents, rerank_depth=depth)
    scores, rows = index.search(queries, k, exclude=exclude)
    assert scores.shape == rows.shape == (9, min(k, depth))
    _, found = InvertedIndex(documents.sparse).search(queries, depth, exclude=exclude)
    all_scores, all_rows = MultiVectorIndex(documents.tokens).search(queries, 40)
    for query in range(9):
        chosen = np.isin(all_rows[query], found[query][found[query] >= 0]) & (all_rows[query] >= 0)
        expected = list(zip(all_rows[query][chosen], all_scores[query][chosen], strict=True))[:k]
        expected += [(-1, 0)] * (min(k, depth) - len(expected))
        assert list(zip(rows[query], scores[query], strict=True)) == expected
    assert (rows >= 0).any()


def test_pairs_have_the_scores_of_the_search(sides):
    queries, documents = sides
    for one, other in (
        sides,
        (Representations(queries.sparse), Representations(documents.sparse)),
        (Representations(None, queries.tokens), Representations(None, documents.tokens)),
    ):
        scores, rows = exact_index(other).search(one, 40)
        found = np.argwhere(rows >= 0)
        pairs = np.stack([found[:, 0], rows[rows >= 0]], axis=1)
        np.testing.assert_array_equal(score_pairs(one, other, pairs), scores[rows >= 0])
        assert len(pairs) > 40
    nothing = (documents.tokens.lengths == 0).nonzero()[0]
    assert score_pairs(queries, documents, np.array([[0, int(nothing)]])).tolist() == [0]


def test_texts_are_cut_out_and_joined_with_all_their_vectors(sides):
    _, documents = sides
    again = Representations.concatenate([documents.slice(0, 13), documents.slice(13, 40)])
    for half, expected in zip(again[:2], documents[:2], strict=True):
        for tensor, other in zip(half[:3], expected[:3], strict=True):
            assert tensor is other is None or torch.equal(tensor, other)
    shuffled = documents.take(torch.arange(39, -1, -1))
    for half, expected in zip(shuffled[:2], documents[:2], strict=True):
        assert half.lengths.tolist() == expected.lengths.tolist()[::-1]
    assert documents.kinds == {"sparse", "tokens"}
    assert documents._replace(sparse=None).slice(0, 3).kinds == {"tokens"}


def test_queries_need_the_vectors_of_the_documents(sides):
    queries, documents = sides
    with pytest.raises(ValueError, match="queries have sparse vectors, but the documents are comp"):
        exact_index(documents).search(Representations(queries.sparse), 3)
    with pytest.raises(
        ValueError, match=r"queries have token vectors, .* compared by sparse vector"
    ):
        exact_index(Representations(documents.sparse)).search(queries._replace(sparse=None), 3)


def with_dense(texts: Representations, seed: int) -> Representations:
    """The same with a dense vector of each text, of small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-3, 4, (texts.num_texts, 5), generator=generator).float()
    return texts._replace(dense=store_tokens(TokenVectors.of_texts(values)))


def sums(queries: Representations, documents: Representations) -> np.ndarray:
    """The weighted sums of all scores, fp64 ``[Q, N]``, one pair after the other."""
    sparse = queries.sparse.dense().double() @ documents.sparse.dense().double().T
    dense = queries.dense.values.double() @ documents.dense.values.double().T
    found = 0.5 * sparse + 4 * dense
    for row in range(queries.num_texts):
        for column in range(documents.num_texts):
            asked, answer = (
                side.tokens.slice(n, n + 1).values.double()
                for side, n in ((queries, row), (documents, column))
            )
            if len(asked) and len(answer):
                found[row, column] += 2 * (asked @ answer.T).amax(1).sum()
    return found.numpy()


@pytest.mark.parametrize("depth", [3, 40])
def test_with_dense_vectors_the_weighted_sum_orders_what_they_and_terms_find(sides, depth):
    queries, documents = (with_dense(side, seed) for seed, side in enumerate(sides))
    queries = queries._replace(score_weights={"sparse": 0.5, "tokens": 2.0, "dense": 4.0})
    truth, exclude = sums(queries, documents), np.arange(27).reshape(9, 3)
    index = exact_index(documents, rerank_depth=depth)
    assert index.kinds == {"sparse", "tokens", "dense"} and index.exact
    scores, rows = index.search(queries, 30, exclude=exclude)
    parts = [Representations(documents.sparse), Representations(dense=documents.dense)]
    candidates = [exact_index(part).search(queries, depth, exclude=exclude).rows for part in parts]
    for query in range(9):
        wanted = {row for found in candidates for row in found[query].tolist() if row >= 0}
        best = sorted(wanted, key=lambda row: (-truth[query, row], row))[:30]
        assert rows[query][rows[query] >= 0].tolist() == best
        np.testing.assert_array_equal(scores[query, : len(best)], truth[query, best])
        assert not {*exclude[query]} & {*best}
    unweighted = index.search(queries._replace(score_weights={}), 30, exclude=exclude)
    assert (unweighted.rows != rows).any()
    pairs = np.argwhere(rows >= 0)
    pairs[:, 1] = rows[rows >= 0]
    np.testing.assert_array_equal(score_pairs(queries, documents, pairs), scores[rows >= 0])


def test_dense_vectors_alone_are_compared_by_dot_product(sides):
    queries, documents = (with_dense(side, seed) for seed, side in enumerate(sides))
    found = exact_index(Representations(dense=documents.dense)).search(queries, 40)
    dense = queries.dense.values.double() @ documents.dense.values.double().T
    expected = dense.gather(1, torch.from_numpy(found.rows)).numpy()
    np.testing.assert_array_equal(found.scores, expected)
    np.testing.assert_array_equal(found.scores, np.sort(dense.numpy())[:, ::-1])


@pytest.mark.parametrize("builder", [CompressedIndexBuilder, SeismicIndexBuilder])
def test_indexes_that_would_pass_over_dense_vectors_refuse_them(builder, sides):
    if builder is SeismicIndexBuilder:
        pytest.importorskip("seismic", reason="pip install 'sparton[seismic]'")
    build = builder()
    with pytest.raises(ValueError, match=r"does not compare dense vectors, .* leave them out, or"):
        build(with_dense(sides[1], 0))
