"""The same numbers as the losses of sentence-transformers, given the same representations."""

import pytest
import torch

from sparton.losses.distillation import KLDivergence, MarginMSE
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE, RankingLoss, Triplet
from sparton.losses.regularizers import L0Flops, Regularizer, flops
from sparton.representations import Representations

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


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_infonce_among_all_documents_of_the_batch(problem, temperature, symmetric):
    """Hard negatives included. Symmetric is theirs with a softmax per direction: positives alone
    look for their queries."""
    columns, *_ = problem
    options = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    loss = peer.SparseMultipleNegativesRankingLoss(
        torch.nn.Identity(), scale=1 / temperature, **(options if symmetric else {})
    )
    leaves = [x.clone().requires_grad_() for x in columns]
    theirs = loss.compute_loss_from_embeddings(leaves, None)
    documents = torch.stack(leaves[1:], dim=1).flatten(0, 1)
    positives = (1 + K) * torch.arange(5)
    ours = InfoNCE(temperature, symmetric)(leaves[0] @ documents.T, positives)
    torch.testing.assert_close(ours, theirs)
    gradients = zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves))
    for actual, expected in gradients:
        torch.testing.assert_close(actual, expected)
        assert not torch.allclose(1.01 * actual, expected)
    other = InfoNCE(temperature, not symmetric)(leaves[0] @ documents.T, positives)
    assert other.item() != pytest.approx(ours.item(), rel=1e-3)


class Passing(torch.nn.Module):
    """A model of which the features are the embeddings."""

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return features


RANKINGS = {
    "base": (InfoNCE(), peer.SparseMultipleNegativesRankingLoss, {}),
    "margin": (MarginMSE(), peer.SparseMarginMSELoss, {}),
    "kl": (KLDivergence(), peer.SparseDistillKLDivLoss, {"temperature": 1.0}),
}


@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("threshold", [None, 6])
@pytest.mark.parametrize("query_weight", [0.05, None])
def test_the_objective_of_splade(problem, ranking, threshold, query_weight):
    """Parts, weights and gradients: what is logged there with its weight is logged here without."""
    columns, _, (*_, teacher) = problem
    own, theirs, options = RANKINGS[ranking]
    loss = peer.SpladeLoss(
        Passing(),
        theirs(Passing(), **options),
        document_regularizer_weight=0.03,
        query_regularizer_weight=query_weight,
        document_regularizer_threshold=threshold,
    )
    leaves = [x.clone().requires_grad_() for x in columns]
    labels = teacher[:, :1] - teacher[:, 1:] if ranking == "margin" else teacher
    expected = loss([{"sentence_embedding": x} for x in leaves], labels)
    penalty = flops if threshold is None else L0Flops(threshold)
    objective = _objective(own, penalty, query_weight)
    documents = torch.stack(leaves[1:], dim=1).flatten(0, 1)
    value = objective(Representations(leaves[0]), Representations(documents), 0, teacher)
    total = torch.stack(list(expected.values())).sum()
    torch.testing.assert_close(value.loss, total)
    torch.testing.assert_close(value.parts["ranking"], expected["base_loss"].detach())
    regularized = {"document_regularizer_loss": ("document_flops", 0.03)}
    if query_weight is not None:
        regularized["query_regularizer_loss"] = ("query_flops", query_weight)
    for name, (part, weight) in regularized.items():
        torch.testing.assert_close(weight * value.parts[part], expected[name].detach())
        assert value.parts[part] > 0.01
    assert set(expected) == {"base_loss", *regularized}
    gradients = zip(torch.autograd.grad(value.loss, leaves), torch.autograd.grad(total, leaves))
    for actual, right in gradients:
        torch.testing.assert_close(actual, right)
        assert not torch.allclose(1.01 * actual, right)


def _objective(ranking: RankingLoss, penalty, query_weight: float | None) -> Objective:
    queries = {} if query_weight is None else {"flops": Regularizer(flops, query_weight)}
    return Objective(ranking, queries, {"flops": Regularizer(penalty, 0.03)})
