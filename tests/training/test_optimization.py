"""Parameter groups: who decays, who learns at which rate, and that schedules reach all."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from sparton.training.optimization import build_optimizer, learning_rates, update

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def encoder() -> nn.ModuleDict:
    torch.manual_seed(0)
    parts = {"query": nn.Linear(3, 2), "document": nn.Linear(3, 2), "query_head": nn.Linear(2, 1)}
    return nn.ModuleDict(parts)


def settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """Rate and decay of every parameter by its name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["base_lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_matrices_decay_and_vectors_do_not():
    model = encoder()
    found = settings(model, build_optimizer(model, ADAMW, weight_decay=0.1))
    assert found == {
        name: (1e-2, 0.1 if parameter.ndim > 1 else 0.0)
        for name, parameter in model.named_parameters()
    }


def test_a_prefix_has_its_own_rate_and_the_longest_counts():
    model = encoder()
    optimizer = build_optimizer(model, ADAMW, 0.1, {"query": 0.5, "query.bias": 0.25})
    assert settings(model, optimizer) == {
        "query.weight": (0.5, 0.1),
        "query.bias": (0.25, 0.0),
        "document.weight": (1e-2, 0.1),
        "document.bias": (1e-2, 0.0),
        "query_head.weight": (1e-2, 0.1),
        "query_head.bias": (1e-2, 0.0),
    }


@pytest.mark.parametrize("fused", [True, False])
def test_versions_count_updates(fused):
    """Also of optimizers that count nothing themselves, as fused ones."""
    model = encoder()
    optimizer = build_optimizer(model, partial(torch.optim.AdamW, lr=1e-2, fused=fused), 0.1)
    before = [parameter._version for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update(optimizer, torch.amp.GradScaler(enabled=False), 1.0, None)
    after = [parameter._version for parameter in model.parameters()]
    assert all(first < second for first, second in zip(before, after, strict=True))


def test_a_schedule_scales_every_group_and_the_log_names_them():
    model = encoder()
    optimizer = build_optimizer(model, ADAMW, 0.1, {"query": 0.5})
    assert learning_rates(optimizer) == {"learning_rate": 1e-2, "learning_rate_query": 0.5}
    for factor in (0.5, 0.1):  # of the base rates, not of the last ones
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        update(optimizer, torch.amp.GradScaler(enabled=False), factor, None)
        assert learning_rates(optimizer) == pytest.approx(
            {"learning_rate": 1e-2 * factor, "learning_rate_query": 0.5 * factor}
        )


def test_a_larger_rate_moves_further():
    model = encoder()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = build_optimizer(model, ADAMW, 0.0, {"query": 0.5})
    update(optimizer, torch.amp.GradScaler(enabled=False), 1.0, None)
    for name, parameter in model.named_parameters():
        step = (before[name] - parameter).abs()
        rate = 0.5 if name.startswith("query.") else 1e-2
        torch.testing.assert_close(step, torch.full_like(step, rate), rtol=1e-4, atol=1e-5)


def test_rates_survive_a_checkpoint():
    model = encoder()
    state = build_optimizer(model, ADAMW, 0.1, {"query": 0.5}).state_dict()
    again = build_optimizer(model, ADAMW, 0.1, {"query": 0.5})
    again.load_state_dict(state)
    assert learning_rates(again) == {"learning_rate": 1e-2, "learning_rate_query": 0.5}


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"qeury": 0.5}, "qeury has a learning rate of its own, 0.5, but no trainable parameter"),
        ({"document": 0.5}, "document has a learning rate of its own"),
        ({"query": 0.0}, "the learning rate of query must be positive and finite, got 0.0"),
        ({"query": math.inf}, "the learning rate of query must be positive and finite, got inf"),
    ],
)
def test_rates_that_mean_nothing_are_refused(rates, message):
    model = encoder()
    model["document"].requires_grad_(False)
    with pytest.raises(ValueError, match=message):
        build_optimizer(model, ADAMW, 0.1, rates)


def test_an_encoder_that_cannot_learn_is_refused():
    with pytest.raises(ValueError, match="nothing to optimise"):
        build_optimizer(encoder().requires_grad_(False), ADAMW, 0.1)
