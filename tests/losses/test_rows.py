"""Losses of representations held without their zeros: those of the dense ones, to the last part."""

import pytest
import torch

from sparton.kernels.sparse_vectors import SparseVectors
from sparton.losses.combination import WeightedSum
from sparton.losses.distillation import KLDivergence, MarginMSE
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE, Triplet
from sparton.losses.regularizers import (
    DFFlops,
    L0Flops,
    Regularizer,
    anti_zero,
    flops,
    flops_of_sums,
    l1,
)
from sparton.losses.rows import active_terms, column_means, document_frequency, dot_scores
from sparton.representations import Representations
from tests.kernels.test_sparse_vectors import random_rows

PENALTIES = [flops, flops_of_sums, L0Flops(0), L0Flops(8), l1, anti_zero, DFFlops(0.4, 3.0)]
NAMES = ["flops", "flops_of_sums", "l0_flops_0", "l0_flops_8", "l1", "anti_zero", "df_flops"]
LOSSES = [
    InfoNCE(),
    InfoNCE(0.5, symmetric=True),
    Triplet(2.0),
    MarginMSE(),
    KLDivergence(2.0),
    WeightedSum({"a": InfoNCE(), "b": MarginMSE()}, {"a": 1.0, "b": 0.1}),
]


def both_forms(dense: torch.Tensor) -> tuple[torch.Tensor, SparseVectors]:
    vectors = SparseVectors.from_dense(dense)
    return (
        dense.clone().requires_grad_(),
        vectors._replace(values=vectors.values.requires_grad_()),
    )


@pytest.mark.parametrize("penalty", PENALTIES, ids=NAMES)
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_penalties(penalty, density):
    dense, vectors = both_forms(random_rows(10, 30, density).double())
    expected, actual = penalty(dense), penalty(vectors)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-12)
    expected.backward()
    actual.backward()
    wanted = dense.grad[dense > 0]
    torch.testing.assert_close(vectors.values.grad, wanted, rtol=1e-6, atol=1e-12)
    assert not torch.allclose(1.01 * vectors.values.grad, wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("penalty", PENALTIES, ids=NAMES)
def test_penalties_of_nothing(penalty):
    dense, vectors = both_forms(torch.zeros(4, 6))
    torch.testing.assert_close(penalty(vectors), penalty(dense))
    penalty(vectors).backward()


@pytest.mark.parametrize("ranking", LOSSES, ids=repr)
def test_objectives(ranking):
    queries, documents = (
        both_forms(random_rows(4, 30, 0.4, 1)),
        both_forms(random_rows(12, 30, 0.4)),
    )
    teacher = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    weights = {f"p{row}": Regularizer(penalty, 0.1) for row, penalty in enumerate(PENALTIES)}
    objective = Objective(ranking, weights, weights)
    dense, sparse = (
        objective(Representations(q), Representations(d), 0, teacher)
        for q, d in zip(queries, documents, strict=True)
    )
    torch.testing.assert_close(sparse.loss, dense.loss)
    torch.testing.assert_close(sparse.parts, dense.parts)
    dense.loss.backward()
    sparse.loss.backward()
    for whole, vectors in (queries, documents):
        torch.testing.assert_close(vectors.values.grad, whole.grad[whole > 0], rtol=1e-5, atol=1e-7)


def test_counts_are_the_same():
    dense, vectors = both_forms(random_rows(10, 30, 0.3))
    assert torch.equal(active_terms(vectors), active_terms(dense))
    torch.testing.assert_close(document_frequency(vectors), document_frequency(dense))
    kept = torch.arange(10) % 3 > 0
    torch.testing.assert_close(column_means(vectors, kept), column_means(dense, kept))
    assert not torch.allclose(column_means(dense, kept), column_means(dense[kept]))


def test_forms_are_not_mixed():
    dense, vectors = both_forms(torch.ones(2, 3))
    with pytest.raises(TypeError, match="held alike"):
        dot_scores(dense, vectors)
