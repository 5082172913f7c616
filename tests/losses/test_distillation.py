"""Distillation losses against their formulas, written out plainly."""

import math

import pytest
import torch

from sparton.losses.distillation import KLDivergence, MarginMSE

SCORES = torch.tensor([[2.0, 0.5, 9.0, 9.0], [9.0, 9.0, 1.0, 4.0]])
POSITIVES = torch.tensor([0, 2])
TEACHER = torch.tensor([[5.0, 1.0], [2.0, 3.0]])


def test_margin_mse_compares_margins_of_a_querys_own_documents():
    expected = ((1.5 - 0.5 * 4) ** 2 + (-3 - 0.5 * -1) ** 2) / 2
    loss = MarginMSE(scale=0.5)(SCORES, POSITIVES, TEACHER)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert MarginMSE()(SCORES, POSITIVES, TEACHER).item() != pytest.approx(expected, rel=1e-2)


def test_kl_divergence_is_the_mean_over_queries():
    expected = 0.0
    for own, teacher in zip([(2.0, 0.5), (1.0, 4.0)], TEACHER.tolist()):
        p = [math.exp(t / 2) / sum(math.exp(x / 2) for x in teacher) for t in teacher]
        q = [math.exp(s / 3) / sum(math.exp(x / 3) for x in own) for s in own]
        expected += sum(a * math.log(a / b) for a, b in zip(p, q)) / 2
    loss = KLDivergence(temperature=3.0, teacher_temperature=2.0)(SCORES, POSITIVES, TEACHER)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", [MarginMSE(), KLDivergence()])
def test_a_student_that_copies_its_teacher_has_no_loss_and_no_gradient(loss):
    scores = torch.zeros(2, 4).scatter(1, torch.tensor([[0, 1], [2, 3]]), TEACHER).requires_grad_()
    value = loss(scores, POSITIVES, TEACHER)
    (gradient,) = torch.autograd.grad(value, scores)
    assert value.item() == pytest.approx(0, abs=1e-6)
    assert gradient.abs().max() < 1e-6
    assert loss(scores + torch.eye(2, 4), POSITIVES, TEACHER).item() > 1e-3


@pytest.mark.parametrize("loss", [MarginMSE(), KLDivergence()])
def test_missing_teachers_and_negatives_are_named(loss):
    with pytest.raises(ValueError, match="no teacher scores: use data=distillation"):
        loss(SCORES, POSITIVES, None)
    with pytest.raises(ValueError, match="set num_negatives"):
        loss(SCORES, POSITIVES, TEACHER[:, :1])


def test_a_temperature_must_be_positive():
    with pytest.raises(ValueError, match="teacher_temperature must be positive, got 0"):
        KLDivergence(teacher_temperature=0)
