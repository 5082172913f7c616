"""One index over sparse vectors, token vectors, or both. N documents, Q queries."""

import numpy as np
import pytest
import torch

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes.exact import exact_index, score_pairs
from sparton.retrieval.indexes.inverted import InvertedIndex
from sparton.retrieval.indexes.maxsim import MultiVectorIndex
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
    exclude = np.arange(9)
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
    exclude = np.arange(9)
    index = exact_index(documents, rerank_depth=depth)
    scores, rows = index.search(queries, k, exclude=exclude)
    assert scores.shape == rows.shape == (9, k)
    _, found = InvertedIndex(documents.sparse).search(queries, depth, exclude=exclude)
    all_scores, all_rows = MultiVectorIndex(documents.tokens).search(queries, 40)
    for query in range(9):
        chosen = np.isin(all_rows[query], found[query][found[query] >= 0]) & (all_rows[query] >= 0)
        expected = list(zip(all_rows[query][chosen], all_scores[query][chosen], strict=True))[:k]
        expected += [(-1, 0)] * (k - len(expected))
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
