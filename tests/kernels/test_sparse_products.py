"""Sums and dot products without zeros: values and gradients are those of the dense matrices."""

import pytest
import torch
from torch import Tensor

from sparton.kernels.sparse_products import column_sums, columns, dot_products, precise, row_sums
from sparton.sparse_vectors import SparseVectors
from tests.test_sparse_vectors import random_rows

Q, N, V = 7, 12, 50
CUTS = [(2**26, 1024), (1, 1), (1, 33)]  # all columns at once, 16, 48


@pytest.fixture(params=CUTS, ids=["whole", "cut", "uneven"])
def cut(request, monkeypatch) -> None:
    for name, size in zip(("ENTRIES", "COLUMNS"), request.param, strict=True):
        monkeypatch.setattr(columns, name, size)


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


def test_vocabularies_must_agree():
    with pytest.raises(ValueError, match="queries of 3 terms and documents of 4"):
        dot_products(leaf(torch.ones(2, 3)), leaf(torch.ones(2, 4)))


def relative_error(actual: Tensor, truth: Tensor) -> float:
    return ((actual.double() - truth).norm() / truth.norm()).item()


def test_products_of_pieces_have_the_accuracy_of_fp32(cut, monkeypatch):
    """As on a GPU, where the pieces are cut; plain bf16 is far outside the bound."""
    monkeypatch.setattr(precise, "in_pieces", lambda x: x.dtype == torch.float32)
    monkeypatch.setattr(precise, "LONGEST", 5)
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(Q, N, generator=generator)
    results = []
    for dtype in (torch.float32, torch.float64):
        sides = pair(0.3, dtype)
        scores = dot_products(*sides)
        loss = (weights.to(dtype) * scores).sum()
        results.append([scores, *torch.autograd.grad(loss, [side.values for side in sides])])
    errors = [relative_error(a, b) for a, b in zip(*results, strict=True)]
    assert max(errors) < 5e-6
    rounded = [side.dense().bfloat16().double() for side in pair(0.3)]
    assert relative_error(rounded[0] @ rounded[1].T, results[1][0]) > 1e-4


def test_transposed_factors_are_cut_alike(monkeypatch):
    monkeypatch.setattr(precise, "in_pieces", lambda x: x.dtype == torch.float32)
    left, right = torch.randn(6, 9), torch.randn(9, 4)
    expected = precise.multiply(precise.left_factor(left), right)
    for a, b in ((left.T.contiguous().T, right), (left, right.T.contiguous().T)):
        torch.testing.assert_close(
            precise.multiply(precise.left_factor(a), b), expected, rtol=1e-6, atol=1e-6
        )
