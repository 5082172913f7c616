"""What the SPLADE head makes of logits that are given, worked out by hand.

N sequences, T packed tokens, V vocabulary. The weight is the identity: hidden states are logits.
"""

from math import e, log, log1p

import numpy as np
import pytest
import torch
from torch import Tensor

from sparton.kernels.splade_head import splade_head, splade_head_reference, splade_head_topk
from tests.kernels.problems import Problem
from tests.kernels.test_splade_head_sum import launch_sum
from tests.kernels.test_splade_head_variants import launch_max

# Three tokens, none, and one. A term may be positive at several tokens, at none, or zero at all;
# of equal logits the first one counts.
LOGITS = [
    [e - 1, -3.0, 0.0, 0.5, 1e30],
    [e**2 - 1, -2.0, 0.0, 0.5, -1e30],
    [-5.0, -0.5, 0.0, 0.5, -7.0],
    [0.5, -3.0, 2.0, 0.0, e - 1],
]
LENGTHS = (3, 0, 1)
HUGE = log(1e30)
NOTHING = [0.0] * 5
LAST = [log(1.5), 0.0, log(3), 0.0, 1.0]
REPS = {
    "max": [[2.0, 0.0, 0.0, log(1.5), HUGE], NOTHING, LAST],
    "sum": [[3.0, 0.0, 0.0, 3 * log(1.5), HUGE], NOTHING, LAST],
}
# Of log1p(relu(x)), of which the second log1p divides each by one more than the value.
SLOPES = [[1 / e, 0, 0, 1 / 1.5, 1e-30], [e**-2, 0, 0, 1 / 1.5, 0], [0, 0, 0, 1 / 1.5, 0]]
SLOPES.append([1 / 1.5, 0, 1 / 3, 0, 1 / e])
WINNERS = torch.tensor([[0, 0, 0, 1, 1], [1, 0, 0, 0, 0], [0] * 5, [1] * 5])
VARIANTS = [(pooling, activation) for pooling in REPS for activation in ("relu", "log1p_relu")]
variants = pytest.mark.parametrize(("pooling", "activation"), VARIANTS)


def problem(device: torch.device) -> Problem:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device)
    return Problem(torch.tensor(LOGITS, device=device), torch.eye(5, device=device), None, bounds)


def expected(pooling: str, activation: str) -> tuple[Tensor, Tensor]:
    """Representations ``[N, V]``, and the gradients of their sum ``[T, V]``."""
    reps, slopes = torch.tensor(REPS[pooling]), torch.tensor(SLOPES)
    if pooling == "max":
        slopes = slopes * WINNERS
    if activation == "relu":
        return reps, slopes
    if pooling == "sum":
        once = [log1p(1) + log1p(2), 0.0, 0.0, 3 * log1p(log(1.5)), log1p(HUGE)]
        reps = torch.tensor([once, NOTHING, [log1p(x) for x in LAST]])
    else:
        reps = reps.log1p()
    return reps, slopes / (1 + torch.tensor(LOGITS).relu().log1p())


def computed(version: str, pooling: str, activation: str, device: torch.device) -> list[Tensor]:
    operands = problem(device)
    if version == "kernels":
        launch = launch_max if pooling == "max" else launch_sum
        return [x.cpu() for x in launch(operands, torch.ones(3, 5, device=device), activation)[:2]]
    hidden = operands.hidden.requires_grad_()
    head = splade_head if version == "public" else splade_head_reference
    reps = head(hidden, *operands[1:], pooling=pooling, activation=activation)
    return [reps.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(reps.sum(), hidden))]


@variants
@pytest.mark.parametrize("version", ["reference", "public", "kernels"])
def test_by_hand(version, pooling, activation, device):
    reps, slopes = computed(version, pooling, activation, device)
    right, right_slopes = expected(pooling, activation)
    torch.testing.assert_close(reps, right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(slopes, right_slopes, rtol=1e-5, atol=1e-12)
    assert torch.equal(reps == 0, right == 0), "what is not positive is exactly zero"
    for other in VARIANTS:
        if other != (pooling, activation):
            assert not torch.allclose(reps, expected(*other)[0], atol=1e-2)
            assert not torch.allclose(slopes, expected(*other)[1], atol=1e-2)


@pytest.mark.parametrize("version", [splade_head, splade_head_reference])
def test_a_bias_moves_logits_before_they_are_cut_off(version, device):
    """And wakes up terms that no token names."""
    bias = torch.tensor([-10.0, e - 0.5, 2.0, -0.5, 0.0], device=device)
    reps = version(*problem(device)._replace(bias=bias))
    right = [[0.0, 1.0, log(3), 0.0, HUGE], NOTHING, [0.0, 0.0, log(5), 0.0, 1.0]]
    torch.testing.assert_close(reps.cpu(), torch.tensor(right))


@variants
def test_the_largest_by_hand(pooling, activation, device):
    found = splade_head_topk(*problem(device), 3, pooling=pooling, activation=activation)
    assert found.indices.tolist() == [[4, 0, 3], [0, 1, 2], [2, 4, 0]]
    right = expected(pooling, activation)[0].gather(1, found.indices.cpu())
    torch.testing.assert_close(found.values.cpu(), right, rtol=1e-6, atol=1e-6)


@variants
@pytest.mark.parametrize("bias", [float("nan"), float("inf"), float("-inf")])
def test_an_empty_sequence_gives_zeros_whatever_the_bias(bias, pooling, activation, device):
    operands = problem(device)._replace(bias=torch.full((5,), bias, device=device))
    launch = launch_max if pooling == "max" else launch_sum
    with np.errstate(invalid="ignore"):  # of the interpreter
        kernels = launch(operands, torch.ones(3, 5, device=device), activation)[0]
    public = splade_head(*operands, pooling=pooling, activation=activation)
    assert kernels[1].tolist() == public[1].tolist() == NOTHING
