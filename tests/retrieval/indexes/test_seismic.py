"""Seismic behind our protocol: recall, and all that its package does otherwise than one thinks.

Skipped where pyseismic-lsr is not installed, as on Python 3.12. N documents, V terms.
"""

import sys

import numpy as np
import pytest
import torch

from sparton.arguments import ArgumentError
from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes.exact import exact_index

seismic = pytest.importorskip("seismic", reason="pip install 'sparton[seismic]'")
from sparton.retrieval.indexes.seismic import SeismicIndexBuilder  # noqa: E402

N, V = 400, 300


def make(number: int, seed: int, width: int = V, terms: int = 20) -> torch.Tensor:
    """Every fourth vector is empty."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(number, width, generator=generator) + 0.05
    weights *= torch.rand(number, width, generator=generator) < terms / width
    weights[::4] = 0
    return weights


def held(weights: torch.Tensor) -> Representations:
    return Representations(SparseVectors.from_dense(weights))


@pytest.fixture(scope="module")
def documents():
    return held(make(N, 0))


@pytest.fixture(scope="module")
def index(documents):
    return SeismicIndexBuilder()(documents)


@pytest.mark.parametrize("terms", [3, 30])
def test_recall_of_short_and_long_queries(index, documents, terms):
    queries = held(make(80, 1, terms=terms))
    found, exact = index.search(queries, 10), exact_index(documents).search(queries, 10)
    hits = [np.isin(e[e >= 0], f).mean() for e, f in zip(exact.rows, found.rows) if e[0] >= 0]
    assert len(hits) > 50 and np.mean(hits) > 0.97
    same = found.rows == exact.rows
    np.testing.assert_allclose(found.scores[same], exact.scores[same], rtol=1e-3)
    assert (found.rows[::4] == -1).all() and (found.scores[::4] == 0).all()
    assert not index.exact and exact_index(documents).exact


def test_results_are_those_of_their_queries(index, documents):
    """The package answers many queries in any order."""
    queries = held(make(N, 0))
    together = index.search(queries, 1)
    # Every document is nearest to itself, but for a few that a longer one covers.
    itself = (together.rows[:, 0] == np.arange(N))[np.arange(N) % 4 != 0]
    assert itself.mean() > 0.8
    for row in (1, 198, 399):
        alone = index.search(queries.slice(row, row + 1), 1)
        assert alone.rows[0, 0] == together.rows[row, 0]


def test_a_poorer_summary_finds_less(documents, index):
    queries = held(make(80, 1, terms=3))
    exact = exact_index(documents).search(queries, 10).rows
    poor = SeismicIndexBuilder(summary_energy=0.05, heap_factor=0.3, n_postings=2)(documents)

    def recall(found: np.ndarray) -> float:
        return np.mean([np.isin(e[e >= 0], f).mean() for e, f in zip(exact, found) if e[0] >= 0])

    assert recall(poor.search(queries, 10).rows) < recall(index.search(queries, 10).rows) - 0.05


def test_documents_that_are_left_out(index):
    queries = held(make(N, 0))
    exclude = np.where(np.arange(N) % 2, np.arange(N), -1)[:, None]
    found = index.search(queries, 5, exclude=exclude)
    assert not (found.rows == exclude)[1::2].any()
    assert (found.rows[1::4] >= 0).all(), "others take their place"
    assert (found.rows[2::4, 0] == np.arange(N)[2::4]).mean() > 0.8


def test_more_results_than_documents(index):
    found = index.search(held(make(4, 2)), N + 10)
    assert found.rows.shape == (4, N)
    full = found.rows[1]
    assert len({*full[full >= 0].tolist()}) == (full >= 0).sum() <= N
    assert (np.diff(found.scores[1]) <= 0).all()


@pytest.mark.parametrize("width", [3, 65_535, 65_536, 70_000])
def test_vocabularies_that_16_bits_do_not_tell_apart(width):
    weights = torch.zeros(3, width)
    weights[1, width - 1], weights[2, 1] = 2, 3
    index = SeismicIndexBuilder()(held(weights))
    found = index.search(held(weights[1:]), 2)
    assert found.rows.tolist() == [[1, -1], [2, -1]]
    assert found.scores[:, 0].tolist() == [4, 9]


def test_weights_that_fp16_does_not_hold():
    weights = torch.zeros(3, 5)
    weights[0, 1], weights[1, 1], weights[2, 1] = 1e6, 2e6, 0.5e6
    query = torch.zeros(1, 5)
    query[0, 1] = 3
    found = SeismicIndexBuilder()(held(weights)).search(held(query), 3)
    assert found.rows.tolist() == [[1, 0, 2]], "infinity would rank all alike"
    np.testing.assert_allclose(found.scores[0], [6e6, 3e6, 1.5e6], rtol=1e-3)


def test_equal_scores_are_ordered_by_document():
    weights = torch.zeros(6, 5)
    weights[:, 2] = 1
    found = SeismicIndexBuilder()(held(weights)).search(held(weights[:1]), 6)
    assert found.rows.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_nothing_is_found_among_nothing():
    index = SeismicIndexBuilder()(held(torch.zeros(2, 5)))
    found = index.search(held(torch.ones(1, 5)), 2)
    assert found.rows.tolist() == [[-1, -1]]


def test_nothing_is_printed(documents, capfd):
    sys.stdout.write("before\n")
    index = SeismicIndexBuilder()(documents)
    index.search(held(make(3, 4)), 2)
    sys.stdout.write("after\n")
    assert capfd.readouterr().out == "before\nafter\n"
    assert index.nbytes > 4 * documents.sparse.num_entries


def test_token_vectors_order_candidates(documents):
    tokens = TokenVectors(
        torch.nn.functional.normalize(torch.randn(N, 4), dim=1).half(),
        cu_seqlens_of(torch.ones(N, dtype=torch.int64)),
    )
    both = documents._replace(tokens=tokens)
    queries = both.slice(1, 30)
    built = SeismicIndexBuilder()(both, rerank_depth=N)
    found = built.search(queries, 3)
    expected = exact_index(both, rerank_depth=N).search(queries, 3)
    assert built.kinds == {"sparse", "tokens"} and not built.exact
    assert (found.rows == expected.rows).mean() > 0.95


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_postings": 0}, "n_postings=0 must be at least 1"),
        ({"query_cut": 0}, "query_cut=0 must be at least 1"),
        ({"summary_energy": 0}, "summary_energy=0 must be above 0 and at most 1"),
        ({"heap_factor": 1.5}, r"heap_factor=1\.5 must be above 0 and at most 1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ArgumentError, match=message):
        SeismicIndexBuilder(**settings)


def test_what_cannot_be_searched(index, documents):
    with pytest.raises(ValueError, match="k is 0, must be at least 1"):
        index.search(documents, 0)
    with pytest.raises(ValueError, match="queries have 7 terms but the index has 300"):
        index.search(held(torch.ones(1, 7)), 3)
    tokens = TokenVectors(torch.ones(1, 4), torch.tensor([0, 1]))
    with pytest.raises(
        ValueError, match=r"Seismic searches sparse vectors, and these .* have none"
    ):
        SeismicIndexBuilder()(Representations(None, tokens))
    with pytest.raises(ValueError, match=r"weights from 0 on alone, and there is -1: set index"):
        SeismicIndexBuilder()(held(-torch.ones(1, 4)))


def test_a_package_that_is_missing_or_too_old(monkeypatch):
    monkeypatch.delattr(seismic, "SeismicDataset")
    with pytest.raises(
        ValueError, match=r"needs pyseismic-lsr from 0\.5\.4 on.*sparton\[seismic\]"
    ):
        SeismicIndexBuilder()
    monkeypatch.setitem(sys.modules, "seismic", None)
    with pytest.raises(ValueError, match="needs pyseismic-lsr"):
        SeismicIndexBuilder()
