"""The same numbers as the losses of sentence-transformers, given the same representations."""

import pytest
import torch

from sparton.losses.distillation import KLDivergence, MarginMSE
from sparton.losses.ranking import Triplet
from sparton.losses.regularizers import L0Flops

peer = pytest.importorskip("sentence_transformers.sparse_encoder.losses")
K = 3


@pytest.fixture
def problem():
    """Representations of 5 queries and of their 1 + K documents; scores, positives, teacher."""
    generator = torch.Generator().manual_seed(8)
    queries = torch.randn(5, 13, generator=generator).relu()
    documents = torch.randn(5 * (1 + K), 13, generator=generator).relu()
    teacher = 3 * torch.randn(5, 1 + K, generator=generator)
    columns = [queries, *documents.view(5, 1 + K, 13).unbind(1)]
    return columns, documents, (queries @ documents.T, (1 + K) * torch.arange(5), teacher)


def test_kl_times_the_squared_temperature(problem):
    columns, _, arguments = problem
    loss = peer.SparseDistillKLDivLoss(torch.nn.Identity(), temperature=2.0)
    theirs = loss.compute_loss_from_embeddings(columns, arguments[2]).item()
    ours = KLDivergence(2.0, 2.0)(*arguments).item()
    assert 4 * ours == pytest.approx(theirs, rel=1e-5)
    assert ours != pytest.approx(theirs, rel=1e-1)


def test_margin_mse(problem):
    columns, _, (scores, positives, teacher) = problem
    margins = teacher[:, :1] - teacher[:, 1:]
    loss = peer.SparseMarginMSELoss(torch.nn.Identity())
    theirs = loss.compute_loss_from_embeddings(columns, margins).item()
    assert MarginMSE()(scores, positives, teacher).item() == pytest.approx(theirs, rel=1e-5)
    assert MarginMSE()(scores, positives, -teacher).item() != pytest.approx(theirs, rel=1e-2)


def test_triplet_with_the_score_as_similarity(problem):
    columns, _, arguments = problem
    loss = peer.SparseTripletLoss(
        torch.nn.Identity(), distance_metric=lambda a, b: -(a * b).sum(-1), triplet_margin=1.0
    )
    pairs = [loss.compute_loss_from_embeddings([*columns[:2], n], None) for n in columns[2:]]
    theirs = torch.stack(pairs).mean().item()
    assert Triplet(1.0)(*arguments).item() == pytest.approx(theirs, rel=1e-5)
    assert Triplet()(*arguments).item() != pytest.approx(theirs, rel=1e-2)


@pytest.mark.parametrize("threshold", [5, 6, 7])
def test_flops_with_a_threshold(problem, threshold):
    documents = problem[1]
    active = (documents > 0).sum(1)
    assert active.min() <= threshold < active.max()
    loss = peer.FlopsLoss(torch.nn.Identity(), threshold=threshold)
    theirs = loss.compute_loss_from_embeddings(documents).item()
    assert L0Flops(threshold)(documents).item() == pytest.approx(theirs, rel=1e-5)
    assert L0Flops(threshold + 1)(documents).item() != pytest.approx(theirs, rel=1e-3)
