"""Losses and regularizers against their formulas, written out plainly."""

import math

import pytest
import torch

from sparton.losses.objective import Objective
from sparton.losses.ramps import ConstantRamp, LinearRamp, QuadraticRamp
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import DFFlops, Regularizer, anti_zero, flops, l1


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


def test_flops_squares_the_batch_mean(reps):
    expected = sum((sum(column) / 6) ** 2 for column in reps.T.tolist())
    assert flops(reps).item() == pytest.approx(expected, rel=1e-5)
    parts = torch.stack([flops(part) for part in reps.chunk(2)]).mean().item()
    assert parts != pytest.approx(expected, rel=1e-2), "the mean over parts must be another number"


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


def test_df_flops_refuses_a_midpoint_outside_the_unit_interval():
    with pytest.raises(ValueError, match=r"midpoint must lie in \(0, 1\), got 1.5"):
        DFFlops(midpoint=1.5)


def test_ramps_are_pure_functions_of_the_step():
    assert [LinearRamp(4)(step) for step in (0, 1, 4, 9)] == [0, 0.25, 1, 1]
    assert [QuadraticRamp(4)(step) for step in (0, 1, 2, 9)] == [0, 0.0625, 0.25, 1]
    assert ConstantRamp()(0) == 1
    with pytest.raises(ValueError, match="steps >= 1, got 0"):
        LinearRamp(0)


def test_objective_adds_weighted_parts_and_scores_in_fp32(reps):
    queries, documents = reps[:2], reps[2:]
    objective = Objective(
        InfoNCE(),
        {"l1": Regularizer(l1, 0.5, LinearRamp(10))},
        {"flops": Regularizer(flops, 0.25)},
    )
    value = objective(queries, documents, step=5)
    ranking = InfoNCE()(queries @ documents.T, torch.tensor([0, 2]))
    expected = ranking + 0.25 * l1(queries) + 0.25 * flops(documents)
    assert value.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert objective.weights_at(5) == {"lambda_q_l1": 0.25, "lambda_d_flops": 0.25}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = objective(queries, documents, step=5)
    assert under_autocast.loss.dtype == torch.float32
    assert torch.equal(under_autocast.loss, value.loss)


def test_objective_refuses_documents_that_queries_cannot_group(reps):
    with pytest.raises(ValueError, match="5 documents cannot be grouped by 2 queries"):
        Objective(InfoNCE())(reps[:2], torch.ones(5, 11), step=0)
