"""Sums and dot products without zeros: values and gradients are those of the dense matrices."""

import pytest
import torch
from torch import Tensor

from sparton.kernels.sparse_products import (
    column_sums,
    dense_dot_products,
    dot_products,
    function,
    kernels,
    precise,
    row_sums,
    spans,
)
from sparton.kernels.sparse_products.columns import read_columns
from sparton.kernels.sparse_vectors import OwnVectors, SparseVectors
from tests.kernels.problems import error
from tests.kernels.test_sparse_vectors import random_rows

Q, N, V = 7, 12, 50
CUTS = [(2**26, 1024), (2**9, 1024), (1, 1), (1, 33)]  # all columns at once, all used ones, 16, 48


@pytest.fixture(params=CUTS, ids=["whole", "used", "cut", "uneven"])
def cut(request, monkeypatch) -> None:
    for name, size in zip(("ENTRIES", "COLUMNS"), request.param, strict=True):
        monkeypatch.setattr(spans, name, size)


def leaf(dense: Tensor, dtype: torch.dtype = torch.float64) -> SparseVectors:
    vectors = SparseVectors.from_dense(dense.to(dtype))
    return vectors._replace(values=vectors.values.requires_grad_())


def pair(density: float, dtype: torch.dtype = torch.float64) -> tuple[SparseVectors, SparseVectors]:
    sides = random_rows(Q, V, density, 1), random_rows(N, V, density, 2)
    return leaf(sides[0], dtype), leaf(sides[1], dtype)


def compare(actual: Tensor, expected: Tensor, *sides: SparseVectors) -> None:
    """Values, and the gradients of a random combination."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).double()
    leaves = [side.values for side in sides]
    given = torch.autograd.grad((weights * actual).sum(), leaves)
    wanted = torch.autograd.grad((weights * expected).sum(), leaves)
    for a, b in zip(given, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert not len(b) or not torch.allclose(a, 1.01 * b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_dot_products(density, cut):
    queries, documents = pair(density)
    expected = queries.dense() @ documents.dense().T
    compare(dot_products(queries, documents), expected, queries, documents)


def test_autocast_changes_nothing(cut):
    queries, documents = pair(0.3, torch.float32)
    weights = torch.linspace(0.1, 1, N)

    def results() -> list[Tensor]:
        scores = dot_products(queries, documents)
        sums = column_sums(documents, weights)
        dense = dense_dot_products(queries.dense(), documents.dense())
        leaves = [queries.values, documents.values]
        return [scores, sums, dense, *torch.autograd.grad(scores.square().sum(), leaves)]

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        found = results()
    assert all(map(torch.equal, found, expected))


def test_terms_of_one_side_alone_are_left_out(cut, monkeypatch):
    """They change nothing, and where there are many entries they cost nothing: of 50 terms 11 are
    columns."""
    sides = random_rows(Q, V, 0.5, 1), random_rows(N, V, 0.5, 2)
    sides[0][:, 31:] = 0
    sides[1][:, :20] = 0
    queries, documents = map(leaf, sides)
    widths = []
    monkeypatch.setattr(
        function, "read_columns", lambda v, span: widths.append(span.width) or read_columns(v, span)
    )
    expected = queries.dense() @ documents.dense().T
    compare(dot_products(queries, documents), expected, queries, documents)
    assert sum(widths) == 4 * (V if spans.ENTRIES >= N * V else 11)


@pytest.mark.parametrize("to_matrix", [True, False])
@pytest.mark.parametrize("some", [True, False])
@pytest.mark.parametrize("block", [8, 1024])
def test_the_kernel_copies_what_the_cpu_copies(to_matrix, some, block, cut, device, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", block)
    vectors = SparseVectors.from_dense(random_rows(N, V, 0.4).to(device))
    used = torch.arange(V) % 3 > 0 if some else None
    parts = spans.cut_columns(V, N, None if used is None else used.to(device))
    assert sum(span.width for span in parts) == (33 if some else V)
    for span in parts:
        wanted = vectors.dense()[:, span.first : span.last]
        if used is not None:
            wanted = wanted[:, used[span.first : span.last].to(device)]
        matrix = torch.zeros(N, span.aligned_width, device=device)
        if to_matrix:
            copy = kernels.copy_entries
            copy(vectors.values, vectors, span, matrix, to_matrix=True)
            assert torch.equal(matrix[:, : span.width], wanted)
            assert not matrix[:, span.width :].any()
            continue
        entries = torch.full_like(vectors.values, -1)
        for strided in (wanted, wanted.T.contiguous().T):
            kernels.copy_entries(entries, vectors, span, strided, to_matrix=False)
            kept = (entries == vectors.values) | (entries == -1)
            assert kept.all() and (entries > 0).sum() == (wanted > 0).sum()


def test_the_kernel_refuses_what_does_not_fit(device):
    vectors = SparseVectors.from_dense(random_rows(N, V, 0.4).to(device))
    (span,) = spans.cut_columns(V, N)
    for shape in ((N, V - 1), (N + 1, V)):
        with pytest.raises(ValueError, match="12 vectors in 50 columns cannot be copied"):
            matrix = torch.zeros(shape, device=device)
            kernels.copy_entries(vectors.values, vectors, span, matrix, to_matrix=True)


@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_sums(density, cut):
    vectors = pair(density)[1]
    compare(row_sums(vectors), vectors.dense().sum(1), vectors)
    weights = torch.rand(N).double()
    compare(column_sums(vectors, weights), weights @ vectors.dense(), vectors)


def test_nothing_active_anywhere(cut):
    queries, documents = leaf(torch.zeros(3, V)), leaf(torch.zeros(4, V))
    scores = dot_products(queries, documents)
    assert scores.shape == (3, 4) and not scores.any()
    total = (
        scores.sum()
        + row_sums(queries).sum()
        + column_sums(documents, torch.ones(4).double()).sum()
    )
    total.backward()
    assert queries.values.grad.shape == documents.values.grad.shape == (0,)


def test_one_side_may_be_constant():
    queries, documents = pair(0.2)
    documents = documents._replace(values=documents.values.detach())
    (gradient,) = torch.autograd.grad(dot_products(queries, documents).sum(), queries.values)
    expected = queries.dense() @ documents.dense().T
    torch.testing.assert_close(gradient, *torch.autograd.grad(expected.sum(), queries.values))


def test_of_gathered_vectors_only_the_own_ones_learn(cut):
    whole, own = [], []
    for side, rows in zip(pair(0.4), (slice(2, 5), slice(0, 7)), strict=True):
        dense = side.dense().detach()
        own.append(leaf(dense[rows]))
        gathered = SparseVectors.from_dense(dense)
        whole.append(gathered._replace(own=OwnVectors(own[-1], rows.start)))

    def dense(side: SparseVectors) -> Tensor:
        return side.dense().index_copy(0, torch.arange(N)[side.own.rows], side.own.vectors.dense())

    weights = torch.rand(N).double()
    compare(dot_products(*whole), dense(whole[0]) @ dense(whole[1]).T, *own)
    compare(row_sums(whole[0]), dense(whole[0]).sum(1), own[0])
    compare(column_sums(whole[1], weights), weights @ dense(whole[1]), own[1])


def test_vocabularies_must_agree():
    with pytest.raises(ValueError, match="queries of 3 terms and documents of 4"):
        dot_products(leaf(torch.ones(2, 3)), leaf(torch.ones(2, 4)))
    with pytest.raises(ValueError, match="queries of 3 terms and documents of 4"):
        dense_dot_products(torch.ones(2, 3), torch.ones(2, 4))


@pytest.mark.parametrize("dense", [False, True])
def test_products_of_pieces_have_the_accuracy_of_fp32(dense, cut, monkeypatch):
    """As on a GPU, where the pieces are cut; plain bf16 is far outside the bound."""
    monkeypatch.setattr(precise, "in_pieces", lambda x: x.dtype == torch.float32)
    monkeypatch.setattr(precise, "LONGEST", 5)
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(Q, N, generator=generator)
    results = []
    for dtype in (torch.float32, torch.float64):
        sides = pair(0.3, dtype)
        if dense:
            leaves = [side.dense().detach().requires_grad_() for side in sides]
            scores = dense_dot_products(*leaves)
        else:
            leaves = [side.values for side in sides]
            scores = dot_products(*sides)
        loss = (weights.to(dtype) * scores).sum()
        results.append([scores, *torch.autograd.grad(loss, leaves)])
    errors = [error(a, b) for a, b in zip(*results, strict=True)]
    assert max(errors) < 1e-5
    rounded = [side.dense().bfloat16().double() for side in pair(0.3)]
    assert error(rounded[0] @ rounded[1].T, results[1][0]) > 1e-4


def test_transposed_factors_are_cut_alike(monkeypatch):
    monkeypatch.setattr(precise, "in_pieces", lambda x: x.dtype == torch.float32)
    left, right = torch.randn(6, 9), torch.randn(9, 4)
    expected = precise.multiply(precise.left_factor(left), right)
    for a, b in ((left.T.contiguous().T, right), (left, right.T.contiguous().T)):
        torch.testing.assert_close(
            precise.multiply(precise.left_factor(a), b), expected, rtol=1e-6, atol=1e-6
        )
