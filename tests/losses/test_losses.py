"""Losses and regularizers against their formulas, written out plainly."""

import math

import pytest
import torch

from sparton.kernels.sparse_vectors import SparseVectors
from sparton.losses.combination import WeightedSum
from sparton.losses.joint import Joint
from sparton.losses.objective import Objective
from sparton.losses.ramps import ConstantRamp, LinearRamp, QuadraticRamp
from sparton.losses.ranking import InfoNCE, RankingLoss, Triplet
from sparton.losses.regularizers import (
    DFFlops,
    L0Flops,
    Regularizer,
    anti_zero,
    flops,
    flops_of_sums,
    l1,
)
from sparton.representations import Representations


@pytest.fixture
def reps() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 11, generator=generator).relu()


def test_infonce_is_the_mean_log_share_of_the_positive():
    scores = torch.tensor([[2.0, 0.0, 1.0, -1.0], [0.5, 0.0, 3.0, 0.0]])
    expected = 0.0
    for row, positive in zip(scores.tolist(), (0, 2)):
        expected -= (
            math.log(math.exp(row[positive] / 0.5) / sum(math.exp(s / 0.5) for s in row)) / 2
        )
    loss = InfoNCE(temperature=0.5)(scores, torch.tensor([0, 2]))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert InfoNCE(temperature=0.51)(scores, torch.tensor([0, 2])).item() != pytest.approx(
        expected, rel=1e-4
    )


@pytest.mark.parametrize("positive", [-100, -1, 4])
def test_infonce_passes_over_no_query(positive):
    with pytest.raises(IndexError, match=f"Target {positive} is out of bounds"):
        InfoNCE()(torch.zeros(2, 4), torch.tensor([positive, 0]))


def test_symmetric_infonce_also_ranks_the_queries():
    scores = torch.tensor([[2.0, 9.0, 1.0, 9.0], [0.5, 9.0, 3.0, 9.0]])
    positives = torch.tensor([0, 2])
    forward = InfoNCE()(scores, positives)
    backward = InfoNCE()(scores[:, [0, 2]].T, torch.tensor([0, 1]))
    both = InfoNCE(symmetric=True)(scores, positives)
    assert both.item() == pytest.approx((forward + backward).item() / 2, rel=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_infonce_refuses_a_temperature_that_is_not_positive(temperature):
    with pytest.raises(ValueError, match="temperature must be positive"):
        InfoNCE(temperature=temperature)


def test_triplet_asks_for_a_margin_over_each_of_a_querys_negatives():
    generator = torch.Generator().manual_seed(4)
    scores = (2 * torch.randn(3, 9, generator=generator, dtype=torch.float64)).requires_grad_()
    positives = torch.tensor([0, 3, 6])
    rows = scores.tolist()
    hinges = [
        max(0.0, 1.5 - rows[query][3 * query] + rows[query][3 * query + n])
        for query in range(3)
        for n in (1, 2)
    ]
    assert 0 < sum(hinge > 0 for hinge in hinges) < len(hinges), "both sides of the hinge"
    loss = Triplet(margin=1.5)(scores, positives)
    assert loss.item() == pytest.approx(sum(hinges) / 6, rel=1e-12)
    for margin in (1.4, 0.0):
        assert Triplet(margin)(scores, positives).item() != pytest.approx(loss.item(), rel=1e-2)
    assert torch.autograd.gradcheck(lambda x: Triplet(1.5)(x, positives), (scores,))
    (gradient,) = torch.autograd.grad(loss, scores)
    own = torch.block_diag(*[torch.ones(1, 3)] * 3).bool()
    assert (gradient[~own] == 0).all() and (gradient[own] != 0).any()


def test_triplet_refuses_what_it_cannot_compare():
    with pytest.raises(ValueError, match="set num_negatives"):
        Triplet()(torch.zeros(3, 3), torch.arange(3))
    for margin in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="margin must be finite, not negative"):
            Triplet(margin)


PENALTIES = {
    "flops": (flops, 2.0**2 + 1.0**2),
    "flops of sums": (flops_of_sums, (4.0**2 + 2.0**2) / 3),
    "l1": (l1, (3 + 3) / 2),
    "rows of one term spared": (L0Flops(1), 0.5**2 + 1.0**2),
    "all rows spared": (L0Flops(2), 0.0),
    "anti-zero": (anti_zero, 1 / 16),
    "rare terms spared": (DFFlops(0.5), 2.0**2 + (1.0 / 2) ** 2),
}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_by_hand(name, sparse):
    """The terms have the means 2, 0 and 1. The anti-zero of SPLADE's authors adds up the batch
    before it squares, and nothing keeps it finite where all is zero: 1 / 36 here."""
    penalty, expected = PENALTIES[name]
    reps = torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]])
    value = penalty(SparseVectors.from_dense(reps) if sparse else reps)
    assert value.item() == pytest.approx(expected, rel=1e-6)


def test_the_slope_of_flops_by_hand():
    """Twice the mean over the number of rows, the same for every row, be it zero or not."""
    reps = torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]], requires_grad=True)
    flops(reps).backward()
    assert reps.grad.tolist() == [[2.0, 0.0, 1.0]] * 2


def test_flops_squares_the_batch_mean(reps):
    expected = sum((sum(column) / 6) ** 2 for column in reps.T.tolist())
    assert flops(reps).item() == pytest.approx(expected, rel=1e-5)
    parts = torch.stack([flops(part) for part in reps.chunk(2)]).mean().item()
    assert parts != pytest.approx(expected, rel=1e-2), "the mean over parts must be another number"


def test_flops_of_sums_grows_with_the_batch_where_flops_does_not(reps):
    expected = sum(sum(column) ** 2 for column in reps.T.tolist()) / 11
    assert flops_of_sums(reps).item() == pytest.approx(expected, rel=1e-5)
    assert flops(reps).item() == pytest.approx(11 / 6**2 * expected, rel=1e-5)
    twice = reps.repeat(2, 1)
    assert flops_of_sums(twice).item() == pytest.approx(4 * expected, rel=1e-5)
    assert flops(twice).item() == pytest.approx(flops(reps).item(), rel=1e-5)


def test_l0_flops_spares_rows_that_are_sparse_already(reps):
    reps = reps.double().requires_grad_()
    active = [sum(value > 0 for value in row) for row in reps.tolist()]
    threshold = sorted(active)[3]
    dense = torch.tensor(active) > threshold
    assert 0 < dense.sum() < 6 and threshold in active
    kept = [row for row, count in zip(reps.tolist(), active) if count > threshold]
    expected = sum((sum(column) / 6) ** 2 for column in zip(*kept))
    value = L0Flops(threshold)(reps)
    assert value.item() == pytest.approx(expected, rel=1e-12)
    for other in (L0Flops(threshold - 1)(reps), flops(reps), flops(reps[dense])):
        assert other.item() != pytest.approx(expected, rel=1e-2)
    (gradient,) = torch.autograd.grad(value, reps)
    assert (gradient[~dense] == 0).all() and (gradient[dense] != 0).any()
    assert torch.equal(L0Flops(0)(reps), flops(reps))
    assert L0Flops(11)(reps).item() == 0
    with pytest.raises(ValueError, match="threshold must not be negative, got -1"):
        L0Flops(-1)


def test_l1_is_the_mean_row_sum(reps):
    assert l1(reps).item() == pytest.approx(sum(sum(r) for r in reps.tolist()) / 6, rel=1e-5)


def test_anti_zero_falls_as_representations_grow(reps):
    assert anti_zero(torch.zeros(2, 5)).item() == 1.0
    assert anti_zero(2 * reps) < anti_zero(reps) < 1


def test_df_flops_spares_rare_terms():
    reps = torch.zeros(100, 3)
    reps[0, 0] = 1.0  # a rare term
    reps[:10, 1] = 1.0  # at the midpoint
    reps[:, 2] = 1.0  # in every document
    weights = []
    for term in range(3):
        alone = torch.zeros_like(reps)
        alone[:, term] = reps[:, term]
        weights.append((DFFlops(midpoint=0.1)(alone) / flops(alone)).sqrt().item())
    assert weights[0] < 1e-3
    assert weights[1] == pytest.approx(0.5, abs=1e-4)
    assert weights[2] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("midpoint", "steepness"), [(0.1, 10.0), (0.4, 3.0), (0.7, 2.0)])
def test_df_flops_is_the_papers_formula(reps, midpoint, steepness):
    """arXiv 2505.15070: sum_t (w_t / N * sum_i r_it)^2, w_t the logistic of a share."""
    reps = reps.double().requires_grad_()
    expected = wrong = 0.0
    slopes = []
    for column in reps.T.tolist():
        share = sum(value > 0 for value in column) / 6
        odds = share ** math.log(2, midpoint) - 1 if share else math.inf
        weight = 1 / (1 + odds**steepness)
        expected += (weight * sum(column) / 6) ** 2
        wrong += weight * (sum(column) / 6) ** 2
        slopes.append(2 * weight**2 * sum(column) / 36)
    value = DFFlops(midpoint, steepness)(reps)
    assert value.item() == pytest.approx(expected, rel=1e-5)
    if midpoint > 0.1:
        assert value.item() != pytest.approx(wrong, rel=1e-2), "the weight is squared with the mean"
    (gradient,) = torch.autograd.grad(value, reps)
    slopes = torch.tensor(slopes, dtype=torch.float64).expand(6, -1)
    torch.testing.assert_close(gradient, slopes, rtol=1e-5, atol=1e-12)


def test_df_flops_refuses_a_midpoint_outside_the_unit_interval():
    with pytest.raises(ValueError, match=r"midpoint must lie in \(0, 1\), got 1.5"):
        DFFlops(midpoint=1.5)


def test_ramps_are_pure_functions_of_the_step():
    assert [LinearRamp(4)(step) for step in (0, 1, 4, 9)] == [0, 0.25, 1, 1]
    assert [QuadraticRamp(4)(step) for step in (0, 1, 2, 9)] == [0, 0.0625, 0.25, 1]
    assert ConstantRamp()(0) == 1
    with pytest.raises(ValueError, match="steps of at least 1, got 0"):
        LinearRamp(0)


def test_objective_adds_weighted_parts_and_scores_in_fp32(reps):
    queries, documents = reps[:2], reps[2:]
    objective = Objective(
        InfoNCE(),
        {"l1": Regularizer(l1, 0.5, LinearRamp(10))},
        {"flops": Regularizer(flops, 0.25)},
    )
    sides = Representations(queries), Representations(documents)
    value = objective(*sides, step=5)
    ranking = InfoNCE()(queries @ documents.T, torch.tensor([0, 2]))
    expected = ranking + 0.25 * l1(queries) + 0.25 * flops(documents)
    assert value.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert objective.weights_at(5) == {"lambda_q_l1": 0.25, "lambda_d_flops": 0.25}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = objective(*sides, step=5)
    assert under_autocast.loss.dtype == torch.float32
    assert torch.equal(under_autocast.loss, value.loss)


def test_objective_refuses_documents_that_queries_cannot_group(reps):
    with pytest.raises(ValueError, match="5 documents cannot be grouped by 2 queries"):
        Objective(InfoNCE())(Representations(reps[:2]), Representations(torch.ones(5, 11)), 0)


class Own(RankingLoss):
    """The positives' scores, negated, as ``reduce`` has them."""

    def __init__(self, reduce):
        self.reduce = reduce

    def __call__(self, scores, positives, teacher_scores):
        return self.reduce(-scores.gather(1, positives[:, None]).squeeze(1))


def test_losses_and_penalties_of_ones_own_are_one_number(reps):
    sides = Representations(reps[:2]), Representations(reps[2:])
    mean, each = Own(torch.Tensor.mean), Own(torch.Tensor.clone)
    expected = -(reps[:2] * reps[[2, 4]]).sum(1).mean()
    assert Objective(mean)(*sides, 0).loss.item() == pytest.approx(expected.item())
    for loss, name in (
        (each, "sparse"),
        (Own(lambda scores: scores.mean().item()), "sparse"),
        (WeightedSum({"mine": each}, {"mine": 1.0}), "mine"),
    ):
        with pytest.raises(ValueError, match=rf"the loss {name} must be a tensor without axes"):
            Objective(loss)(*sides, 0)
    for penalty in (lambda rows: rows.sum(1), lambda rows: 1.0):
        objective = Objective(mean, {}, {"mine": Regularizer(penalty, 1.0)})
        with pytest.raises(ValueError, match="the penalty document_mine must be a tensor without"):
            objective(*sides, 0)


def test_losses_and_penalties_of_ones_own_without_a_gradient_are_refused(reps):
    """Beside another summand, which learns, nobody would notice."""
    constant = Own(lambda scores: scores.mean().detach())
    learning = Representations(reps[:2].clone().requires_grad_()), Representations(reps[2:])
    fixed = Representations(reps[:2]), Representations(reps[2:])
    penalty = {"mine": Regularizer(lambda rows: rows.detach().mean(), 1.0)}
    for objective, name in (
        (Objective(constant, {"l1": Regularizer(l1, 1.0)}), "the loss sparse"),
        (
            Objective(WeightedSum({"a": InfoNCE(), "b": constant}, {"a": 1.0, "b": 1.0})),
            "the loss b",
        ),
        (Objective(InfoNCE(), penalty), "the penalty query_mine"),
    ):
        with pytest.raises(ValueError, match=f"{name} has no gradient, so nothing would learn"):
            objective(*learning, 0)
        objective(*fixed, 0)
        with torch.no_grad():
            objective(*learning, 0)
    Objective(InfoNCE(), {}, penalty)(*learning, 0)  # whose documents do not learn


class Learned(torch.nn.Module, RankingLoss):
    """Cross entropy of scores times a number that is meant to be learned, or is not."""

    def __init__(self, learns):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=learns)

    def forward(self, scores, positives, teacher_scores=None):
        return torch.nn.functional.cross_entropy(scores * self.scale, positives)


@pytest.mark.parametrize(
    "make",
    [
        Objective,
        lambda loss: WeightedSum({"mine": loss}, {"mine": 1.0}),
        lambda loss: Joint(sparse=InfoNCE(), tokens=loss),
        lambda penalty: Regularizer(penalty, 1.0),
    ],
)
def test_weights_of_a_loss_of_ones_own_are_refused(make):
    """No optimizer has them, so that they would stay what they are."""
    make(Learned(learns=False))
    with pytest.raises(ValueError, match="Learned has weights of its own, scale, but a training"):
        make(Learned(learns=True))


def test_what_lacks_parts_of_a_loss_is_refused():
    class Bare:
        def __call__(self, scores, positives, teacher_scores):
            return scores.mean()

    wrong = r"Bare is no loss, since it has no needs_negatives, .* a subclass of .*RankingLoss"
    for make in (
        Objective,
        lambda loss: WeightedSum({"mine": loss}, {"mine": 1.0}),
        lambda loss: Joint(sparse=InfoNCE(), tokens=loss),
    ):
        make(InfoNCE())
        with pytest.raises(ValueError, match=wrong):
            make(Bare())
