"""Search over compressed token vectors against MaxSim of what they are restored to. N documents,
Q queries, C centroids."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.maxsim import decompress
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes import centroid_lists, compressed, compression
from sparton.retrieval.indexes.centroid_lists import CentroidLists
from sparton.retrieval.indexes.compressed import CompressedIndex
from sparton.retrieval.indexes.compression import CompressedIndexBuilder
from sparton.retrieval.indexes.exact import TwoStageIndex
from sparton.retrieval.indexes.maxsim import MultiVectorIndex
from sparton.retrieval.storing import store_sparse, store_tokens
from tests.retrieval.indexes.test_maxsim import DEVICES, best, random_vectors, reference, texts_of


def topical(texts: int, seed: int, *, topics: int = 12, tokens: int = 30) -> TokenVectors:
    """Texts of 0 to ``tokens`` tokens, each near some of a text's three words of its topic, as
    embeddings of a language are: of the same meanings again and again."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(topics * 8, 32, generator=torch.Generator().manual_seed(99))
    topic = torch.randint(topics, (texts, 1), generator=generator)
    own = topic * 8 + torch.randint(8, (texts, 3), generator=generator)
    lengths = torch.randint(0, tokens + 1, (texts,), generator=generator)
    owner = torch.repeat_interleave(torch.arange(texts), lengths)
    word = own[owner, torch.randint(3, owner.shape, generator=generator)]
    noise = torch.randn(len(word), 32, generator=generator)
    return TokenVectors(F.normalize(words[word] + 0.6 * noise, dim=1), cu_seqlens_of(lengths))


def build(documents: Representations, device: str = "cpu", **settings) -> CompressedIndex:
    return CompressedIndexBuilder(**settings)(documents, device)


def restored(index: CompressedIndex, documents: Representations) -> TokenVectors:
    """What the index takes the documents for."""
    codec, tokens = (type(x)(*(y.cpu() for y in x)) for x in (index.codec, index._documents))
    values = decompress(codec, tokens, normalize=False) * tokens.inverse_norms.float()[:, None]
    return TokenVectors(values, documents.tokens.cu_seqlens)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
@pytest.mark.parametrize("k", [1, 10, 200])
def test_exhaustive_search_equals_reference(device, nbits, k):
    """Documents and queries without tokens, masked tokens, more results than documents, and two
    documents of each query left out."""
    documents = texts_of(random_vectors(57, seed=0, whole=False))
    queries = texts_of(random_vectors(140, seed=1, whole=False), "float32")
    exclude = (np.arange(280) % 58 - 1).reshape(140, 2)
    index = build(documents, device, nbits=nbits)
    scores, rows = index.search(queries, k, exclude=exclude)
    plain = restored(index, documents)
    unit = queries.tokens._replace(values=F.normalize(queries.tokens.values, dim=1))
    expected, expected_rows = best(reference(unit, plain), k, exclude)
    assert (expected_rows == -1).any() and scores.dtype == np.float32
    tolerance = 1e-5 if device == "cpu" else 1e-3
    np.testing.assert_allclose(scores, expected, atol=tolerance)
    assert not np.allclose(scores * (1 + 10 * tolerance), expected, atol=tolerance)
    same = rows == expected_rows
    assert np.abs(expected[~same] - scores[~same]).max(initial=0) < tolerance and same.mean() > 0.95
    again = index.search(queries, k, exclude=exclude)
    np.testing.assert_array_equal(again.scores, scores)
    np.testing.assert_array_equal(again.rows, rows)


@pytest.mark.quick(2)
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("limit", [1, 40])
def test_pieces_change_nothing(staged, limit, monkeypatch):
    documents, queries = texts_of(topical(80, 0)), texts_of(topical(150, 1))
    index = build(documents, staged=staged)
    expected = index.search(queries, 9)
    monkeypatch.setattr(compressed, "_PRODUCTS_AT_ONCE", limit * len(index.codec.centroids))
    monkeypatch.setattr(compressed, "_PAIRS_AT_ONCE", 7)
    index._chunk_tokens = limit
    found = index.search(queries, 9)
    # Products of other shapes round otherwise: a few of the last bits of a score.
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-6)
    assert (found.rows == expected.rows).mean() > 0.99
    monkeypatch.setattr(compressed, "_HITS_AT_ONCE", 1)
    np.testing.assert_allclose(index.search(queries, 9).scores, expected.scores, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_stages_that_leave_nothing_out_find_what_is_found_without(device):
    documents, queries = texts_of(topical(90, 2)), texts_of(topical(40, 3))
    plain = build(documents, device, staged=False)
    index = build(documents, device, staged=True, probes=10_000)
    for k, exclude in ((5, None), (120, np.arange(40)[:, None])):
        expected = plain.search(queries, k, exclude=exclude)
        found = index.search(queries, k, exclude=exclude)
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
        assert (found.rows == expected.rows).mean() > 0.99
    alone = [index.search(queries.slice(q, q + 1), 5).rows[0] for q in range(40)]
    assert (np.stack(alone) == index.search(queries, 5).rows).mean() > 0.99


def recall(found: np.ndarray, expected: np.ndarray) -> float:
    """Share of the documents of one ranking that the other has."""
    pairs = zip(found, expected, strict=True)
    shares = [np.isin(best[best >= 0], own).mean() for own, best in pairs if (best >= 0).any()]
    return float(np.mean(shares))


def test_recall_of_stages_on_topics():
    """The stages of a collection whose tokens repeat themselves; a list of the wrong documents, and
    candidates by chance, find much less."""
    documents, queries = texts_of(topical(1000, 4)), texts_of(topical(50, 5, tokens=8))
    everything = build(documents, staged=False).search(queries, 10).rows
    index = build(documents, staged=True, candidates=60)
    assert recall(index.search(queries, 10).rows, everything) >= 0.95
    assert recall(build(documents, staged=True, probes=1, candidates=10).search(queries, 10).rows,
                  everything) < 0.9  # fmt: skip
    lists = index._lists
    shuffled = lists.documents[torch.randperm(len(lists.documents))]
    index._lists = lists._replace(documents=(shuffled * 7 + 1) % 900)
    assert recall(index.search(queries, 10).rows, everything) < 0.9


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_rerank_equals_search_among_the_candidates(device, staged):
    documents, queries = texts_of(topical(57, 6)), texts_of(topical(30, 7))
    index = build(documents, device, staged=staged)
    rng = np.random.default_rng(0)
    candidates = np.array([rng.permutation(57)[:21] for _ in range(30)])
    candidates[rng.random(candidates.shape) < 0.2] = -1
    scores, rows = index.rerank(queries, candidates)
    everything = build(documents, device, staged=False).search(queries, 57)
    for query in range(30):
        inside = np.isin(everything.rows[query], candidates[query][candidates[query] >= 0])
        inside &= everything.rows[query] >= 0
        count = inside.sum()
        np.testing.assert_allclose(
            scores[query, :count], everything.scores[query][inside], atol=1e-4
        )
        assert sorted(rows[query, :count]) == sorted(everything.rows[query][inside])
        assert (rows[query, count:] == -1).all() and (scores[query, count:] == 0).all()
    assert (rows >= 0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [False, True])
def test_documents_on_the_host_are_found_as_those_on_a_gpu(staged, monkeypatch):
    documents, queries = texts_of(topical(300, 8)), texts_of(topical(40, 9))
    resident = build(documents, "cuda", staged=staged)
    monkeypatch.setattr(compression, "RESIDENT", 0.0)
    streamed = build(documents, "cuda", staged=staged)
    assert resident._documents.codes.is_cuda and not streamed._documents.codes.is_cuda
    streamed._chunk_tokens = 500
    for found, expected in zip(
        streamed.search(queries, 9), resident.search(queries, 9), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


class Operations(TorchDispatchMode):
    """Counts the operations that make a tensor or write to one, not those that only look at it."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given, made = (
            {x.untyped_storage().data_ptr() for x in tree_leaves(values) if isinstance(x, Tensor)}
            for values in (args, result)
        )
        self.number += function._schema.is_mutable or not made or not made <= given
        return result


@pytest.mark.parametrize(("staged", "few"), [(True, 50), (False, 40)])
def test_a_query_asks_for_few_operations(staged, few):
    """A host takes as long to ask a GPU for each as the GPU takes for many of them. There are as
    many whatever the number of documents, and twice as many at most for several queries."""
    queries, counts = texts_of(topical(20, 9)), []
    for texts in (200, 400):
        index = build(texts_of(topical(texts, 8)), staged=staged)
        for number in (1, 20):
            asked = queries.slice(0, number)
            with Operations() as operations:
                index.search(asked, 9)
            counts.append(operations.number)
    one, several = counts[:2]
    assert counts[2:] == [one, several]
    assert one <= few and several <= 2 * few


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("Q", [1, 5])
@pytest.mark.parametrize(("P", "k"), [(40, 1), (40, 7), (40, 50), (9000, 4097)])
def test_the_best_of_listed_pairs(P, k, Q, device):
    """Ties, NaN, minus infinity, and a query without pairs; or no pairs at all."""
    generator = torch.Generator().manual_seed(0)
    owners = torch.randint(max(Q - 1, 1), (P,), generator=generator).sort().values.int()
    scores = torch.randint(-3, 4, (P,), generator=generator).float()
    scores[[3, 20]], scores[[5, 21, 38]] = torch.nan, -torch.inf
    order = scores.nan_to_num(torch.inf).neg().tolist()
    expected = [
        sorted((owners == q).nonzero().flatten().tolist(), key=order.__getitem__)[:k]
        for q in range(Q)
    ]
    best, places = (
        x.cpu() for x in compressed._best_of(scores.to(device), owners.to(device), Q, k)
    )
    real = places >= 0
    assert [own[own >= 0].tolist() for own in places] == expected
    assert torch.equal(best[real].nan_to_num(9), scores[places[real]].nan_to_num(9))
    assert (best[~real] == -torch.inf).all() and real.all() == (Q == 1)
    none = compressed._best_of(scores[:0].to(device), owners[:0].to(device), Q, k)
    assert none[0].shape == none[1].shape == (Q, 0)


@pytest.mark.parametrize("number", [1, 6])
def test_equal_scores_are_in_the_order_of_the_documents(number, monkeypatch):
    """Whatever the order of their centroids' scores, and where candidates alone have scores."""
    score = compressed.maxsim_residual_varlen
    monkeypatch.setattr(
        compressed, "maxsim_residual_varlen", lambda *x, **y: score(*x, **y).round()
    )
    queries = texts_of(topical(20, 18)).slice(2, 2 + number)
    for candidates, k in ((4096, 240), (30, 30)):
        index = build(texts_of(topical(240, 17)), staged=True, probes=16, candidates=candidates)
        scores, rows = index.search(queries, k)
        same = (np.diff(scores) == 0) & (rows[:, 1:] >= 0)
        assert same.any() and (np.diff(rows)[same] > 0).all()


def test_documents_apart_from_where_they_are_scored():
    """As a GPU has those on the host: candidates are copied and renumbered."""
    documents, queries = texts_of(topical(200, 8)), texts_of(topical(40, 9))
    index, asked = build(documents, staged=True), (queries, queries.slice(1, 2))
    expected = [index.search(each, 9) for each in asked]
    index._whole = None
    for each, same in zip(asked, expected, strict=True):
        found = index.search(each, 9)
        np.testing.assert_array_equal(found.scores, same.scores)
        np.testing.assert_array_equal(found.rows, same.rows)


@pytest.mark.parametrize("at_once", [2**24, 50, 1])
def test_centroid_lists_have_every_document_once(at_once, monkeypatch):
    monkeypatch.setattr(centroid_lists, "TOKENS_AT_ONCE", at_once)
    lengths = torch.randint(0, 9, (40,), generator=torch.Generator().manual_seed(0))
    bounds = cu_seqlens_of(lengths)
    codes = torch.randint(0, 6, (int(bounds[-1]),), generator=torch.Generator().manual_seed(1))
    lists = CentroidLists.of(codes.int(), bounds, 7, torch.device("cpu"))
    expected = [
        [n for n, (a, b) in enumerate(pairwise(bounds.tolist())) if centroid in codes[a:b]]
        for centroid in range(7)
    ]
    found = [x.tolist() for x in lists.documents.split(lists.cu_seqlens.diff().tolist())]
    assert found == expected and expected[6] == []
    assert lists.nbytes == 4 * sum(map(len, expected)) + 8 * 8
    queries = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    hits = lists.hits(torch.tensor([[2], [6], [3], [2]]), queries, 40)
    assert hits.dtype == torch.int32 and torch.equal(
        lists.hits(torch.tensor([[2, 6], [3, 2]]), torch.tensor([0, 1, 1, 2]), 40), hits
    )
    pairs = [(0, n) for n in expected[2]] + [(2, n) for n in sorted({*expected[2], *expected[3]})]
    assert hits.tolist() == [list(pair) for pair in pairs]


def test_bytes_are_what_is_held():
    documents = texts_of(topical(300, 10))
    T, C = len(documents.tokens.values), 32
    plain = build(documents, nbits=2, centroids=C, staged=False)
    filled = int((documents.tokens.lengths > 0).sum())
    codec = 4 * (C * 32 + 3 + 4)
    bounds = 8 * (301 + filled + 2 * (filled + 1))
    assert plain.nbytes == T * (4 + 32 * 2 // 8 + 2) + codec + bounds
    assert build(documents, nbits=4, centroids=C).nbytes == plain.nbytes + T * 8 + 4 * 24
    staged = build(documents, nbits=2, centroids=C, staged=True)
    assert staged.nbytes == plain.nbytes + staged._lists.nbytes


def test_more_bits_come_nearer_and_stages_begin_with_the_size():
    documents, queries = texts_of(topical(200, 11)), texts_of(topical(40, 12))
    exact = MultiVectorIndex(documents.tokens).search(queries, 10)
    errors, shares = [], []
    for nbits in (1, 2, 4, 8):
        found = build(documents, nbits=nbits, centroids=64).search(queries, 10)
        errors.append(np.abs(found.scores - exact.scores).mean())
        shares.append(recall(found.rows, exact.rows))
    assert errors == sorted(errors, reverse=True) and errors[3] < errors[0] / 10
    assert shares[0] < 0.95 < shares[3]
    T = len(documents.tokens.values)
    assert build(documents, exhaustive_tokens=T + 1)._lists is None
    assert build(documents, exhaustive_tokens=T)._lists is not None
    assert build(documents, exhaustive_tokens=T, staged=False)._lists is None


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [0, 2], [3, 0, 1]])
def test_collections_of_hardly_any_tokens(lengths, staged):
    values = F.normalize(torch.randn(sum(lengths), 8), dim=1)
    tokens = TokenVectors(values.half(), cu_seqlens_of(torch.tensor(lengths, dtype=torch.int64)))
    queries = texts_of(random_vectors(5, seed=6, whole=False))
    index = build(Representations(tokens=tokens), staged=staged)
    scores, rows = index.search(queries, 4)
    assert rows.shape == scores.shape == (5, len(lengths))
    expected = {n for n, length in enumerate(lengths) if length}
    for found, length in zip(rows, queries.tokens.lengths, strict=True):
        assert {*found.tolist()} - {-1} == (expected if length else set())
    candidates = np.tile(np.arange(len(lengths)), (5, 1))
    for found in index.rerank(queries, candidates).rows[queries.tokens.lengths.numpy() > 0]:
        assert {*found.tolist()} - {-1} == expected
    assert index.rerank(queries, np.full((5, 2), -1)).rows.tolist() == [[-1, -1]] * 5
    alone = queries.slice(int(queries.tokens.lengths.argmin()), 5).slice(0, 1)
    assert alone.tokens.lengths.item() == 0 and (index.search(alone, 2).rows == -1).all()
    none = Representations(tokens=queries.tokens.slice(0, 0))
    assert index.search(none, 3).rows.shape == (0, min(3, len(lengths)))


def test_sparse_vectors_find_candidates_where_there_are_both():
    tokens = topical(60, 13)
    weights = torch.rand(60, 9, generator=torch.Generator().manual_seed(0))
    both = Representations(store_sparse(weights * (weights > 0.7)), store_tokens(tokens))
    index = CompressedIndexBuilder()(both, rerank_depth=7)
    assert isinstance(index, TwoStageIndex) and index.kinds == {"sparse", "tokens"}
    rows = index.search(both, 9).rows
    candidates = index._first.search(both, 7).rows
    assert (rows[:, 7:] == -1).all()
    for own, found in zip(rows, candidates, strict=True):
        assert {*own[own >= 0]} <= {*found}


def test_the_same_documents_give_the_same_bytes():
    documents = texts_of(topical(100, 14))
    first, second, third = (build(documents, nbits=nbits, staged=True) for nbits in (2, 2, 1))
    for x, y in zip(
        (*first._documents, *first.codec, *first._lists),
        (*second._documents, *second.codec, *second._lists), strict=True,
    ):  # fmt: skip
        assert torch.equal(x, y)
    assert not torch.equal(first._documents.residuals[:, :4], third._documents.residuals)


def test_what_cannot_be_compressed_or_compared_is_refused():
    tokens = topical(30, 15)
    documents = texts_of(tokens)
    with pytest.raises(ValueError, match="nbits=3 must be 1, 2, 4 or 8"):
        CompressedIndexBuilder(nbits=3)
    for setting in ("centroids", "probes", "candidates"):
        with pytest.raises(ValueError, match=f"{setting}=0 must be at least 1"):
            CompressedIndexBuilder(**{setting: 0})
    sparse = Representations(store_sparse(torch.ones(3, 4)))
    with pytest.raises(ValueError, match="these documents have none: set index=exact_index"):
        build(sparse)
    with pytest.raises(ValueError, match="one of these has the length 2: set index=exact_index"):
        build(texts_of(tokens._replace(values=tokens.values * 2)))
    with pytest.raises(ValueError, match="need at least as many tokens"):
        build(documents, centroids=5000)
    index = build(documents)
    with pytest.raises(ValueError, match="queries have vectors of 8, documents of 32"):
        index.search(texts_of(random_vectors(5, seed=14, whole=False)), 3)
    with pytest.raises(ValueError, match="candidates from 0 to 30"):
        index.rerank(documents, np.array([[30, 0]] * 30))
    with pytest.raises(ValueError, match="the same candidate twice"):
        index.rerank(documents, np.array([[1, 1]] * 30))
    with pytest.raises(ValueError, match="k is 0"):
        index.search(documents, 0)


def test_progress_is_shown_only_when_asked_for(capsys):
    documents = texts_of(topical(40, 16))
    for staged in (False, True):
        index = build(documents, staged=staged)
        index.search(documents, 3)
        index.rerank(documents, np.zeros((40, 1), np.int64))
        assert capsys.readouterr().err == ""
        index.search(documents, 3, progress="toy: search")
        index.rerank(documents, np.zeros((40, 1), np.int64), progress="toy: rerank")
        err = capsys.readouterr().err
        assert "toy: search" in err and "toy: rerank" in err and "40/40" in err
