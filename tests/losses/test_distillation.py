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


def test_min_max_brings_a_querys_scores_to_0_and_1_before():
    scores = torch.tensor([[2.0, 0.5, 1.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 7.0, 7.0, 7.0]])
    teacher = torch.tensor([[0.9, 0.1, 0.3], [0.2, 0.7, 0.4]])
    scaled = torch.tensor([[1.0, 0.0, 1 / 3, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 0.0, 0.0, 0.0]])
    positives = torch.tensor([0, 3])
    loss = KLDivergence(0.5, min_max=True)(scores.requires_grad_(), positives, teacher)
    assert loss.item() == pytest.approx(KLDivergence(0.5)(scaled, positives, teacher).item())
    assert loss.item() != pytest.approx(KLDivergence(0.5)(scores, positives, teacher).item())
    (gradient,) = torch.autograd.grad(loss, scores)
    assert gradient.isfinite().all() and gradient[0, 0] != 0


def test_min_max_of_one_negative_is_refused():
    scores = torch.randn(2, 6, requires_grad=True)
    loss, positives = KLDivergence(min_max=True), torch.tensor([0, 3])
    assert loss(scores, positives, torch.rand(2, 3)).requires_grad
    for compute in (loss, loss.of_queries):
        with pytest.raises(ValueError, match=r"to 0 and 1, whatever .* two negatives \(num_neg"):
            compute(scores[:, :4], torch.tensor([0, 2]), torch.rand(2, 2))


@pytest.mark.parametrize(("apart", "most"), [(0.0, 0.0), (1e-5, 1000.0)])
def test_min_max_of_scores_that_are_all_alike_makes_no_large_gradient(apart, most):
    scores = torch.tensor([[5.0, 5.0, 5.0 + apart]], requires_grad=True)
    teacher = torch.tensor([[1.0, 0.0, 0.5]])
    loss = KLDivergence(min_max=True)(scores, torch.tensor([0]), teacher)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert gradient.abs().max() <= most and bool(gradient.any()) == bool(apart)


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
    with pytest.raises(ValueError, match="no teacher scores: use data that has"):
        loss(SCORES, POSITIVES, None)
    with pytest.raises(ValueError, match="set num_negatives"):
        loss(SCORES[:, :2], torch.tensor([0, 1]), TEACHER[:, :1])
    with pytest.raises(ValueError, match=r"teacher_scores \[2, 3\] where each of 2 queries has 2"):
        loss(SCORES, POSITIVES, torch.zeros(2, 3))


@pytest.fixture
def five_ways() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of 3 queries with 5 documents each, positives, teacher scores; fp64."""
    generator = torch.Generator().manual_seed(5)
    scores = 4 * torch.randn(3, 15, generator=generator, dtype=torch.float64)
    teacher = 4 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    return scores.requires_grad_(), torch.tensor([0, 5, 10]), teacher


def plain_margin_mse(scores, teacher) -> float:
    errors = [
        (scores[query][5 * query] - scores[query][5 * query + n] - teacher[query][0] + t) ** 2
        for query in range(3)
        for n, t in enumerate(teacher[query])
        if n
    ]
    return sum(errors) / len(errors)


def plain_kl(scores, teacher, temperature: float, teacher_temperature: float) -> float:
    total = 0.0
    for query in range(3):
        own = [math.exp(s / temperature) for s in scores[query][5 * query : 5 * query + 5]]
        targets = [math.exp(t / teacher_temperature) for t in teacher[query]]
        for s, t in zip(own, targets):
            total += t / sum(targets) * math.log(t / sum(targets) / (s / sum(own)))
    return total / 3


def test_several_negatives_against_plain_references(five_ways):
    scores, positives, teacher = five_ways
    plain = scores.tolist(), teacher.tolist()
    margin = MarginMSE()(scores, positives, teacher).item()
    assert margin == pytest.approx(plain_margin_mse(*plain), rel=1e-12)
    kl = KLDivergence(3.0, 2.0)(scores, positives, teacher).item()
    assert kl == pytest.approx(plain_kl(*plain, 3.0, 2.0), rel=1e-12)
    for other in (plain_kl(*plain, 2.0, 3.0), 9 * plain_kl(*plain, 3.0, 2.0)):
        assert kl != pytest.approx(other, rel=1e-2)
    shuffled = teacher[:, [1, 0, 2, 3, 4]]
    assert MarginMSE()(scores, positives, shuffled).item() != pytest.approx(margin, rel=1e-3)
    assert KLDivergence(3.0, 2.0)(scores, positives, shuffled).item() != pytest.approx(kl, rel=1e-3)


@pytest.mark.parametrize("loss", [MarginMSE(), KLDivergence(), KLDivergence(3.0, 2.0)])
def test_gradients_reach_a_querys_own_documents_only(loss, five_ways):
    scores, positives, teacher = five_ways
    assert torch.autograd.gradcheck(lambda x: loss(x, positives, teacher), (scores,))
    (gradient,) = torch.autograd.grad(loss(scores, positives, teacher), scores)
    own = torch.block_diag(*[torch.ones(1, 5)] * 3).bool()
    assert (gradient[own] != 0).all() and (gradient[~own] == 0).all()


def test_the_gradient_of_kl_shrinks_with_the_squared_temperature(five_ways):
    """As documented: nothing multiplies the temperature's square back."""
    scores, positives, teacher = five_ways

    def steepness(temperature: float) -> float:
        loss = KLDivergence(temperature, temperature)(scores, positives, teacher)
        return torch.autograd.grad(loss, scores)[0].norm().item()

    assert steepness(1e3) / steepness(2e3) == pytest.approx(4, rel=1e-2)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_temperatures_and_scales_must_be_positive_numbers(value):
    """Others would turn the lesson round, or make every weight NaN in the first step."""
    for name in ("temperature", "teacher_temperature"):
        with pytest.raises(ValueError, match=f"KLDivergence {name} must be positive and finite"):
            KLDivergence(**{name: value})
    with pytest.raises(ValueError, match=f"MarginMSE scale must be positive and finite, .*{value}"):
        MarginMSE(value)


def test_a_teacher_that_is_certain_leaves_finite_losses_and_gradients():
    """Of scores so far apart that the softmax of the second one is 0 in fp32."""
    scores = torch.tensor([[1.0, 3.0]], requires_grad=True)
    loss = KLDivergence(teacher_temperature=0.1)(
        scores, torch.tensor([0]), torch.tensor([[8.5, -10]])
    )
    assert loss.item() == pytest.approx(math.log1p(math.exp(2)), rel=1e-6)
    loss.backward()
    away = 1 / (1 + math.exp(-2))
    torch.testing.assert_close(scores.grad, torch.tensor([[-away, away]]))
