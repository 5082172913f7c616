"""One index over sparse vectors, token vectors, or both. N documents, Q queries."""

import numpy as np
import pytest
import torch

from sparton.representations import TokenVectors
from sparton.retrieval.encoding import EncodedTexts
from sparton.retrieval.index import TextIndex, score_pairs
from sparton.retrieval.multivector import MultiVectorIndex
from sparton.retrieval.sparse import SparseIndex, SparseRows
from sparton.retrieval.tokens import TokenRows


def texts(count: int, seed: int) -> EncodedTexts:
    """Both kinds of vectors, of small whole numbers; some texts have none."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 4, (count, 12), generator=generator).float()
    weights *= torch.rand(count, 12, generator=generator) < 0.3
    lengths = torch.randint(0, 5, (count,), generator=generator)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    values = torch.randint(-2, 3, (int(bounds[-1]), 4), generator=generator).float()
    tokens = TokenRows.from_vectors(TokenVectors(values, bounds))
    return EncodedTexts(SparseRows.from_dense(weights), tokens)


@pytest.fixture
def sides() -> tuple[EncodedTexts, EncodedTexts]:
    return texts(9, 0), texts(40, 1)


def test_each_kind_of_vectors_is_searched_by_its_own_index(sides):
    queries, documents = sides
    exclude = np.arange(9)
    sparse = TextIndex(EncodedTexts(documents.sparse)).search(
        EncodedTexts(queries.sparse), 7, exclude=exclude
    )
    tokens = TextIndex(EncodedTexts(None, documents.tokens)).search(
        EncodedTexts(None, queries.tokens), 7, exclude=exclude
    )
    for found, expected in (
        (sparse, SparseIndex(documents.sparse).search(queries.sparse, 7, exclude=exclude)),
        (tokens, MultiVectorIndex(documents.tokens).search(queries.tokens, 7, exclude=exclude)),
    ):
        for array, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize(("k", "depth"), [(5, 12), (12, 12), (30, 12), (3, 100)])
def test_with_both_maxsim_orders_what_sparse_vectors_find(sides, k, depth):
    queries, documents = sides
    exclude = np.arange(9)
    scores, rows = TextIndex(documents).search(queries, k, exclude=exclude, rerank_depth=depth)
    assert scores.shape == rows.shape == (9, k)
    _, found = SparseIndex(documents.sparse).search(queries.sparse, depth, exclude=exclude)
    all_scores, all_rows = MultiVectorIndex(documents.tokens).search(queries.tokens, 40)
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
        (EncodedTexts(queries.sparse), EncodedTexts(documents.sparse)),
        (EncodedTexts(None, queries.tokens), EncodedTexts(None, documents.tokens)),
    ):
        scores, rows = TextIndex(other).search(one, 40)
        found = np.argwhere(rows >= 0)
        pairs = np.stack([found[:, 0], rows[rows >= 0]], axis=1)
        np.testing.assert_array_equal(score_pairs(one, other, pairs), scores[rows >= 0])
        assert len(pairs) > 40
    nothing = np.flatnonzero(documents.tokens.row_lengths == 0)[:1]
    assert score_pairs(queries, documents, np.array([[0, nothing[0]]])).tolist() == [0]


def test_texts_are_cut_out_and_joined_with_all_their_vectors(sides):
    _, documents = sides
    again = EncodedTexts.concatenate([documents.slice(0, 13), documents.slice(13, 40)])
    for half, expected in zip(again, documents, strict=True):
        for array, other in zip(half, expected, strict=True):
            np.testing.assert_array_equal(array, other)
    shuffled = documents.take(np.arange(40)[::-1])
    assert shuffled.sparse.row_lengths.tolist() == documents.sparse.row_lengths.tolist()[::-1]
    assert shuffled.tokens.row_lengths.tolist() == documents.tokens.row_lengths.tolist()[::-1]
    assert documents.kinds == {"sparse", "tokens"}
    assert documents._replace(sparse=None).slice(0, 3).kinds == {"tokens"}


def test_queries_need_the_vectors_of_the_documents(sides):
    queries, documents = sides
    with pytest.raises(ValueError, match="queries have sparse vectors, but the documents sparse v"):
        TextIndex(documents).search(EncodedTexts(queries.sparse), 3)
    with pytest.raises(ValueError, match="queries have sparse vectors and token vectors, but the"):
        TextIndex(EncodedTexts(None, documents.tokens)).search(queries, 3)
