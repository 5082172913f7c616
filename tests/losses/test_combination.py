"""Weighted sums of ranking losses, and their parts in the objective."""

import math

import pytest
import torch

from sparton.losses.combination import WeightedSum
from sparton.losses.distillation import KLDivergence, MarginMSE
from sparton.losses.joint import Joint
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE, Triplet
from sparton.losses.regularizers import Regularizer, l1
from sparton.representations import Representations

LOSSES = {"infonce": InfoNCE(0.5), "margin": MarginMSE(), "triplet": Triplet(2.0)}
WEIGHTS = {"infonce": 0.5, "margin": 0.25, "triplet": 3.0}


@pytest.fixture
def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64 scores of 4 queries with 3 documents each, positives, teacher scores."""
    generator = torch.Generator().manual_seed(6)
    scores = torch.randn(4, 12, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return scores, 3 * torch.arange(4), teacher


def test_value_and_gradient_are_the_weighted_sums(problem):
    scores = problem[0]
    value = WeightedSum(LOSSES, WEIGHTS)(*problem)
    (gradient,) = torch.autograd.grad(value, scores)
    expected, expected_gradient = 0.0, torch.zeros_like(scores)
    for name, loss in LOSSES.items():
        part = loss(*problem)
        expected += WEIGHTS[name] * part.item()
        expected_gradient += WEIGHTS[name] * torch.autograd.grad(part, scores)[0]
    assert value.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-14)
    swapped = WeightedSum(LOSSES, WEIGHTS | {"infonce": 0.25, "margin": 0.5})(*problem)
    assert swapped.item() != pytest.approx(expected, rel=1e-3)


def test_a_sum_needs_what_one_of_its_losses_needs():
    def needs(**losses) -> tuple[bool, bool]:
        total = WeightedSum(losses, dict.fromkeys(losses, 1.0))
        return total.needs_negatives, total.needs_teacher

    assert needs(a=InfoNCE(), b=InfoNCE(2.0)) == (False, False)
    assert needs(a=InfoNCE(), b=Triplet()) == (True, False)
    assert needs(a=InfoNCE(), b=KLDivergence()) == (True, True)


def test_parts_that_are_no_losses_of_scores_are_refused():
    joint = Joint(InfoNCE(), InfoNCE())
    for make in (
        lambda: WeightedSum({"joint": joint, "own": InfoNCE()}, {"joint": 1.0, "own": 1.0}),
        lambda: Joint(joint, InfoNCE()),
    ):
        with pytest.raises(ValueError, match=r"Joint is no loss of one matrix of scores"):
            make()
    WeightedSum({"a": WeightedSum(LOSSES, WEIGHTS)}, {"a": 1.0})


def test_the_objective_logs_the_sum_and_its_unweighted_losses():
    generator = torch.Generator().manual_seed(7)
    queries = torch.rand(4, 9, generator=generator).requires_grad_()
    documents, teacher = torch.rand(12, 9, generator=generator), torch.rand(4, 3)
    objective = Objective(WeightedSum(LOSSES, WEIGHTS), {"l1": Regularizer(l1, 0.1)})
    sides = Representations(queries), Representations(documents)
    value = objective(*sides, step=0, teacher_scores=teacher)
    names = ["ranking", "ranking_infonce", "ranking_margin", "ranking_triplet", "query_l1"]
    assert list(value.parts) == names
    assert not any(part.requires_grad for part in value.parts.values())
    scores = queries @ documents.T
    for name, loss in LOSSES.items():
        expected = loss(scores, 3 * torch.arange(4), teacher).item()
        assert value.parts[f"ranking_{name}"].item() == pytest.approx(expected, rel=1e-6)
    total = sum(WEIGHTS[name] * value.parts[f"ranking_{name}"].item() for name in LOSSES)
    assert value.parts["ranking"].item() == pytest.approx(total, rel=1e-6)
    assert value.loss.item() == pytest.approx(total + 0.1 * l1(queries).item(), rel=1e-6)
    assert list(Objective(InfoNCE())(*sides, step=0).parts) == ["ranking"]


@pytest.mark.parametrize(
    ("losses", "weights", "message"),
    [
        ({}, {}, "at least one loss"),
        (LOSSES, {"infonce": 1.0}, r"weights are given for \['infonce'\] but the losses are"),
        ({"a": InfoNCE()}, {"a": -1.0}, "weight of loss 'a' must be finite and not negative"),
        ({"a": InfoNCE()}, {"a": 0.0}, r"all weights of \['a'\] are 0"),
        ({"a": InfoNCE()}, {"a": math.nan}, "weight of loss 'a' must be finite and not negative"),
    ],
)
def test_what_makes_no_sum_is_refused(losses, weights, message):
    with pytest.raises(ValueError, match=message):
        WeightedSum(losses, weights)
