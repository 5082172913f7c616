"""Averages of weights against numbers worked out by hand and in float64."""

import pytest
import torch
from torch import nn

from sparton.training.averaging import (
    AveragedWeights,
    ExponentialAverage,
    StochasticWeightAverage,
)


def trained(
    rule, weights: list[list[float]], dtype=torch.float32
) -> tuple[nn.Linear, AveragedWeights]:
    """A layer that begins with the first weights and had each of the others after a step."""
    layer = nn.Linear(2, 1, bias=False, dtype=dtype)
    layer.weight.data = torch.tensor([weights[0]], dtype=dtype)
    averages = AveragedWeights(layer, rule, len(weights) - 1)
    for completed, each in enumerate(weights[1:], 1):
        layer.weight.data.copy_(torch.tensor([each]))
        averages.update(completed)
    return layer, averages


def test_the_first_steps_of_an_exponential_average_by_hand():
    _, averages = trained(ExponentialAverage(0.2), [[8.0, 0.0], [0.0, 11.0], [4.0, 4.0]])
    # Decays (1 + 1) / (10 + 1) = 2 / 11, then 3 / 12 > 0.2.
    first = torch.tensor([8 * 2 / 11, 11 * 9 / 11])
    expected = 0.2 * first + 0.8 * 4
    torch.testing.assert_close(averages.state_dict()["weight"][0], expected)
    assert not torch.allclose(0.25 * first + 0.75 * 4, expected, rtol=1e-3)


def test_a_long_exponential_average_is_that_of_float64():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(400, 2, generator=generator)
    _, averages = trained(ExponentialAverage(0.9), weights.tolist())
    expected = weights[0].double()
    for completed, weight in enumerate(weights[1:].double(), 1):
        decay = min(0.9, (1 + completed) / (10 + completed))
        expected = decay * expected + (1 - decay) * weight
    found = averages.state_dict()["weight"][0]
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, weights[1:].mean(0), atol=1e-2)


def test_the_plain_mean_counts_the_last_part_alone():
    weights = torch.arange(18.0).square().view(9, 2)
    _, averages = trained(StochasticWeightAverage(0.5), weights.tolist())
    torch.testing.assert_close(averages.state_dict()["weight"][0], weights[5:].mean(0))
    _, before = trained(StochasticWeightAverage(0.9), weights[:2].tolist())
    assert torch.equal(before.state_dict()["weight"][0], weights[1])


def test_the_average_of_bf16_weights_does_not_stand_still():
    layer, averages = trained(
        ExponentialAverage(0.999), [[1.0, 1.0]] + [[1.0078125, 1.0]] * 20_000, torch.bfloat16
    )
    average = averages.state_dict()["weight"][0]
    assert average.dtype == torch.float32 and average[0] > 1.0077
    narrow = torch.tensor(1.0, dtype=torch.bfloat16)
    assert narrow.lerp(torch.tensor(1.0078125, dtype=torch.bfloat16), 0.001) == 1
    with averages.applied():
        assert layer.weight.dtype == torch.bfloat16


def test_inside_are_the_averages_and_afterwards_the_own_weights_bit_for_bit():
    layer, averages = trained(StochasticWeightAverage(0), [[0.0, 0.0], [1.0, 0.1], [2.0, 0.7]])
    own = layer.weight.detach().clone()
    with pytest.raises(KeyError), averages.applied():
        torch.testing.assert_close(layer.weight[0].detach(), torch.tensor([1.5, 0.4]))
        raise KeyError
    assert torch.equal(layer.weight, own)


def test_frozen_weights_are_not_copied():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    averages = AveragedWeights(model, ExponentialAverage(), 10)
    assert list(averages.state_dict()) == ["1.weight", "1.bias"]


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_shares_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match=rf"decay={value} must be in \[0, 1\)"):
        ExponentialAverage(value)
    with pytest.raises(ValueError, match=rf"start={value} must be in \[0, 1\)"):
        StochasticWeightAverage(value)
