"""Weights that products share between passes."""

from contextlib import nullcontext
from threading import Thread

import pytest
import torch
from torch import nn

from sparton.products import keeping_weights, linear


def layers(bias=True):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(6, width, bias=bias) for width in (3, 5))


def half():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_a_product_is_that_of_each_layer(bias, kept):
    parts, x = layers(bias), torch.randn(4, 6)
    with keeping_weights(parts) if kept else nullcontext(), half():
        for _ in range(2):
            together = linear(x, *parts)
            assert together.dtype == torch.bfloat16
            torch.testing.assert_close(together, torch.cat([part(x) for part in parts], dim=-1))


def test_without_its_bias():
    (part, _), x = layers(), torch.randn(4, 6)
    torch.testing.assert_close(linear(x, part, bias=False), x @ part.weight.T)


def count_rounded(run):
    """How often autograd and autocast made bfloat16 of something."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    return sum(event.name == "aten::_to_copy" for event in profiler.events())


def test_weights_are_rounded_once():
    parts = layers()
    x = torch.randn(4, 6).bfloat16()

    def passes(kept):
        with keeping_weights(parts) if kept else nullcontext(), half():
            for _ in range(3):
                with torch.no_grad():
                    linear(x, *parts)

    kept = count_rounded(lambda: passes(True))
    with half():
        linear(x, *parts)
        again = count_rounded(lambda: [linear(x, *parts) for _ in range(3)])
    assert kept == 2  # the weights and the biases
    assert again == 6


def test_gradients_add_up_after_passes_without_one():
    parts, others = layers(), layers()
    xs = torch.randn(3, 4, 6)
    with keeping_weights(parts), half():
        with torch.no_grad():
            linear(xs[0], *parts)
        for x in xs:
            linear(x, *parts).float().square().sum().backward()
    for x in xs:
        with half():
            torch.cat([part(x) for part in others], dim=-1).float().square().sum().backward()
    for part, other in zip(parts, others, strict=True):
        assert part.weight.grad.abs().sum() > 0
        torch.testing.assert_close(part.weight.grad, other.weight.grad, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(part.bias.grad, other.bias.grad, rtol=1e-2, atol=1e-2)


def test_sharded_weights_are_not_kept(monkeypatch):
    import torch.distributed.tensor

    parts, x = layers(), torch.randn(4, 6).bfloat16()

    def passes():
        with keeping_weights(parts), half(), torch.no_grad():
            for _ in range(3):
                linear(x, *parts)

    assert count_rounded(passes) == 2
    monkeypatch.setattr(torch.distributed.tensor, "DTensor", nn.Parameter)
    assert count_rounded(passes) == 6


def test_weights_that_change_are_read_again():
    (part, _), x = layers(), torch.randn(4, 6)
    with keeping_weights(part), half():
        before = linear(x, part)
        with torch.no_grad():
            part.weight.mul_(2)
        assert torch.equal(linear(x, part), part(x))
        assert not torch.equal(linear(x, part), before)


def test_layers_are_kept_for_each_group_that_begins_with_them():
    parts, x = layers(), torch.randn(4, 6)
    first, second = parts
    with keeping_weights(parts), half():
        for group in ([first, second], [first], [first, first]):
            assert torch.equal(linear(x, *group), torch.cat([part(x) for part in group], dim=1))


def test_nothing_is_kept_outside_nor_for_another_thread():
    parts, found = layers(), []
    x = torch.randn(4, 6)

    def in_thread():
        parts[0].weight.data = parts[0].weight.data * 2  # changes no version
        found.append(linear(x, *parts))

    with keeping_weights(parts):
        kept = linear(x, *parts)
        thread = Thread(target=in_thread)
        thread.start()
        thread.join()
        assert torch.equal(linear(x, *parts), kept)
    now = torch.cat([part(x) for part in parts], dim=-1)
    torch.testing.assert_close(found[0], now)
    torch.testing.assert_close(linear(x, *parts), now)
    assert not torch.allclose(kept, now, atol=1e-3)


def test_other_layers_run_as_they_are():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    part, doubled, x = nn.Linear(6, 3), Doubled(6, 3), torch.randn(4, 6)
    with keeping_weights(part):
        found = linear(x, part, doubled)
    torch.testing.assert_close(found, torch.cat([part(x), doubled(x)], dim=-1))


def test_frozen_and_learning_layers_keep_their_own_gradients():
    parts = layers()
    parts[0].requires_grad_(False)
    linear(torch.randn(4, 6), *parts).sum().backward()
    assert parts[0].weight.grad is None
    assert parts[1].weight.grad is not None
