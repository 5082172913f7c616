"""Dot products of sparse vectors on a GPU: the accuracy of fp32, and the same bits every time."""

import pytest
import torch
from torch import Tensor

from sparton.kernels.sparse_products import (
    column_sums,
    dense_dot_products,
    dot_products,
    row_sums,
    spans,
)
from sparton.kernels.sparse_vectors import SparseVectors
from tests.kernels.problems import error

pytestmark = pytest.mark.gpu


def random_side(rows: int, width: int, density: float, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    weights = torch.randn(rows, width, device="cuda", generator=generator).abs().log1p()
    return weights * (torch.rand(rows, width, device="cuda", generator=generator) < density)


def results(sides: list[Tensor], upstream: Tensor, dense: bool) -> list[Tensor]:
    """Scores, and the gradients of their weighted sum and of sums at the active entries."""
    vectors = [SparseVectors.from_dense(side) for side in sides]
    leaves = [each.values.requires_grad_() for each in vectors]
    if dense:
        scores = dense_dot_products(*(each.dense() for each in vectors))
    else:
        scores = dot_products(*vectors)
    totals = row_sums(vectors[0]), column_sums(vectors[1], torch.ones_like(upstream[0]))
    loss = (upstream * scores).sum() + totals[0].square().sum() + totals[1].square().sum()
    return [scores.detach(), *totals, *torch.autograd.grad(loss, leaves)]


def truth(sides: list[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [side.double().requires_grad_() for side in sides]
    scores = leaves[0] @ leaves[1].T
    totals = leaves[0].sum(1), leaves[1].sum(0)
    loss = (upstream * scores).sum() + totals[0].square().sum() + totals[1].square().sum()
    gradients = torch.autograd.grad(loss, leaves)
    return [scores, *totals, *(g[s > 0] for g, s in zip(gradients, sides, strict=True))]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("density", [0.01, 0.5])
@pytest.mark.parametrize("least_columns", [1024, 2**20])
def test_scores_and_gradients_have_the_accuracy_of_fp32(dense, density, least_columns, monkeypatch):
    monkeypatch.setattr(spans, "ENTRIES", 1)
    monkeypatch.setattr(spans, "COLUMNS", least_columns)
    sides = [random_side(300, 9001, density, 1), random_side(517, 9001, density, 2)]
    generator = torch.Generator("cuda").manual_seed(3)
    upstream = torch.randn(300, 517, device="cuda", generator=generator)
    given, expected = results(sides, upstream, dense), truth(sides, upstream.double())
    for actual, wanted in zip(given, expected, strict=True):
        assert error(actual, wanted) < 1e-5
    rounded = [side.bfloat16().double() for side in sides]
    assert error(rounded[0] @ rounded[1].T, expected[0]) > 5e-5
    again = results(sides, upstream, dense)
    assert all(torch.equal(a, b) for a, b in zip(again, given, strict=True))
