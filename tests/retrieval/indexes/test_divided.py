"""Documents that several devices share are found as if one had them all."""

import pickle
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

from sparton.arguments import ArgumentError
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes.divided import DividedIndex
from sparton.retrieval.indexes.documents import Documents, TokenParts
from sparton.retrieval.indexes.exact import TwoStageIndex, exact_index
from sparton.retrieval.indexes.maxsim import MultiVectorIndex

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH = 8


def token_vectors(lengths: list[int], seed: int, *, whole: bool = True) -> TokenVectors:
    """Sums of products of small whole numbers are exact in whatever order, and full of ties."""
    generator = torch.Generator().manual_seed(seed)
    shape = sum(lengths), WIDTH
    values = torch.randint(-1, 2, shape, generator=generator).half()
    if not whole:
        values = torch.randn(shape, generator=generator).half()
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return TokenVectors(values, bounds)


def divided(documents: TokenVectors | TokenParts, shares: int, device: str = "cpu") -> DividedIndex:
    return DividedIndex(TokenParts.of(documents), [torch.device(device)] * shares)


def assert_same(found, wanted) -> None:
    np.testing.assert_array_equal(found.rows, wanted.rows)
    np.testing.assert_array_equal(found.scores, wanted.scores)
    assert found.scores.dtype == wanted.scores.dtype and found.rows.dtype == wanted.rows.dtype


@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any),
    shares=st.integers(1, 5),
    k=st.integers(1, 15),
    cut=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_results_are_those_of_one_index(lengths, shares, k, cut, seed):
    documents = token_vectors(lengths, seed)
    number, rng = len(lengths), np.random.default_rng(seed)
    queries = Representations(tokens=token_vectors([2, 0, 3], seed + 1))
    cut = min(cut, number)
    parts = [documents.slice(*each) for each in ((0, cut), (cut, number)) if each[0] < each[1]]
    one, several = MultiVectorIndex(documents), divided(TokenParts(parts), shares)
    exclude = rng.integers(-1, number, (3, 2))
    for barred in (None, exclude):
        wanted = one.search(queries, k, exclude=barred)
        assert_same(several.search(queries, k, exclude=barred), wanted)
    candidates = np.stack([rng.permutation(number) for _ in range(3)])
    candidates[rng.random(candidates.shape) < 0.3] = -1
    assert_same(several.rerank(queries, candidates), one.rerank(queries, candidates))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shares", [2, 3])
def test_scores_are_the_same_on_a_gpu_to_the_bit(device, shares):
    lengths = np.random.default_rng(0).integers(0, 40, 600).tolist()
    documents = token_vectors(lengths, 1, whole=False)
    queries = Representations(tokens=token_vectors([5, 0, 9, 32], 2, whole=False))
    one, several = MultiVectorIndex(documents, device), divided(documents, shares, device)
    candidates = np.stack([np.random.default_rng(row).permutation(600)[:70] for row in range(4)])
    for found, wanted in (
        (several.search(queries, 50), one.search(queries, 50)),
        (several.rerank(queries, candidates), one.rerank(queries, candidates)),
    ):
        if device == "cuda":
            assert_same(found, wanted)
        np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-5)
    assert several.nbytes >= documents.values.nbytes


@pytest.mark.parametrize("kind", ["dense", "tokens"])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_equal_documents_are_equally_good_wherever_they_are(num_queries, kind):
    """And so are in their order, of one index and of several."""
    vectors = normalize(torch.randn(1001, 384, generator=torch.Generator().manual_seed(0))).half()
    vectors[::97] = vectors[-3:] = vectors[0]
    same = [*range(0, 1001, 97), 998, 999, 1000]
    asked = normalize(torch.randn(num_queries, 384, generator=torch.Generator().manual_seed(1)))
    asked[0] = vectors[0]  # so that these are the best
    documents, queries = (
        TokenVectors(each.half(), torch.arange(len(each) + 1, dtype=torch.int32))
        for each in (vectors, asked)
    )
    index = MultiVectorIndex(documents, kind=kind)
    several = DividedIndex(TokenParts.of(documents), [torch.device("cpu")] * 3, kind)
    for each in (index, several):
        found = each.search(Representations(**{kind: queries}), len(same))
        assert found.rows[0].tolist() == same and len({*found.scores[0].tolist()}) == 1
        candidates = np.tile(np.array(same)[::-1], (num_queries, 1))
        found = each.rerank(Representations(**{kind: queries}), candidates)
        assert (found.rows == same).all() and all(len({*row}) == 1 for row in found.scores.tolist())


def test_each_device_has_about_as_many_tokens():
    documents = token_vectors([1] * 30 + [30] * 3, 0)
    shares = [(each.first, each.last) for each in divided(documents, 3)._shares]
    assert shares == [(0, 31), (31, 32), (32, 33)]


def test_several_devices_share_token_vectors_and_lone_dense_ones():
    tokens, ones = token_vectors([2, 1, 3], 0), token_vectors([1, 1, 1], 1)
    sparse = SparseVectors.from_dense(torch.eye(3))
    more = {"more_devices": ["cpu"]}
    assert isinstance(exact_index(Representations(tokens=tokens), **more), DividedIndex)
    assert isinstance(exact_index(Representations(tokens=tokens)), MultiVectorIndex)
    assert exact_index(Representations(dense=ones), **more).kinds == {"dense"}
    both = Documents.of(Representations(sparse, tokens))
    index, alone = exact_index(both, **more), exact_index(both)
    assert isinstance(index, TwoStageIndex) and isinstance(index._second, DividedIndex)
    assert index.kinds == alone.kinds and index.exact
    queries = Representations(sparse, token_vectors([1, 2, 2], 3))
    assert_same(index.search(queries, 2), alone.search(queries, 2))
    nothing = Representations(tokens=token_vectors([0, 0], 0))
    assert exact_index(nothing, **more).search(nothing, 1).rows.tolist() == [[-1], [-1]]


def test_what_no_index_takes_is_refused_in_the_same_words():
    documents = token_vectors([2, 1, 3], 0)
    index, queries = divided(documents, 2), Representations(tokens=token_vectors([2], 1))
    for candidates, said in (
        ([[0, 3]], "candidates from 0 to 3, but documents have the rows 0 to 2"),
        ([[0, -2]], "candidates from -2 to 0"),
        ([[2, 2]], "the same candidate twice"),
        ([[0], [1]], r"must be \[Q, C\] with Q = 1"),
        ([0], r"must be \[Q, C\] with Q = 1"),
        ([[0.5]], "candidates are float64, must be an array of int64"),
    ):
        for each in (index, MultiVectorIndex(documents)):
            with pytest.raises(ValueError, match=said):
                each.rerank(queries, np.array(candidates))
    for k, exclude, said in (
        (0, None, "k is 0, must be at least 1"),
        (2.5, None, "k=2.5 must be a whole number"),
        (True, None, "k=True must be a whole number"),
        (1, np.array([0]), r"exclude has the shape \(1,\), must be an array \[Q, M\]"),
        (1, [0], "exclude is a list, must be an array"),
        (1, 3, "exclude is a int, must be an array"),
    ):
        for each in (index, MultiVectorIndex(documents)):
            with pytest.raises(ValueError, match=said):
                each.search(queries, k, exclude=exclude)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cpu", "more_devices='cpu' must be a list of devices"),
        (None, "more_devices=None must be a list"),
        (["gpu"], r"more_devices=\['gpu'\]: 'gpu' cannot be used \(Expected one of cpu"),
        (["cpu", 3.5], r"more_devices=\['cpu', 3.5\]: 3.5 cannot be used"),
    ],
)
def test_what_is_no_list_of_devices_is_refused(given, said):
    documents = Representations(tokens=token_vectors([2, 1, 3], 0))
    with pytest.raises(ArgumentError, match=said):
        exact_index(documents, more_devices=given)


def test_it_can_be_copied_and_used_in_a_process_that_forks():
    documents, queries = token_vectors([2, 1, 3], 0), Representations(tokens=token_vectors([2], 1))
    index = divided(documents, 2)
    wanted = index.search(queries, 3)
    assert_same(pickle.loads(pickle.dumps(index)).search(queries, 3), wanted)
    child = get_context("fork").Process(target=index.search, args=(queries, 3))
    child.start()
    child.join(60)
    assert child.exitcode == 0
