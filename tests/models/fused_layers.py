"""What tests of fused layers share: a GPU, or a CPU that the modules take for one, and what a model
makes of four sequences, packed or each by itself."""

import pytest
import torch
from torch import Tensor, nn

from sparton.models.body import EncoderBody
from sparton.types import TokenBatch

on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
# The interpreter computes bfloat16 products wrongly.
HALF = torch.bfloat16 if on_gpu else torch.float16
LENGTHS = (2, 1, 9, 6)


class Adapted(nn.Linear):
    """What an adapter does to a linear layer: more than the product with its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


def adapt(model: nn.Module, *names: str) -> None:
    """Linear layers of these names, or all, by adapted ones of the same parameters."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (not names or name in names):
                adapted = Adapted(child.in_features, child.out_features)
                adapted.weight, adapted.bias = child.weight, child.bias
                setattr(parent, name, adapted)


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 60, (n,), generator=generator).to(DEVICE) for n in LENGTHS]


def stock_states(model: nn.Module) -> Tensor:
    """Each sequence by itself."""
    return torch.cat([model(input_ids=ids[None]).last_hidden_state[0] for ids in sequences()])


def packed_states(body: EncoderBody) -> Tensor:
    tokens = TokenBatch.from_lists([ids.tolist() for ids in sequences()])
    return body.hidden_states(tokens.to(DEVICE))


def results(module: nn.Module, states: Tensor) -> dict[str, Tensor]:
    """The states, and the gradients of all parameters but those of keys' biases, which are 0."""
    weights = torch.linspace(-1, 1, states.numel(), device=DEVICE).view_as(states)
    (states.float() * weights).sum().backward()
    found = {"states": states.detach().float()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and "key.bias" not in name:
            found[name.removeprefix("model.")] = parameter.grad
    return found


def distances(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == truth.keys()
    return {name: float((found[name] - x).norm() / x.norm()) for name, x in truth.items()}


def assert_same(body: EncoderBody, stock: nn.Module) -> None:
    """States and gradients of transformers' own layers."""
    truth = results(stock, stock_states(stock))
    assert max(distances(results(body, packed_states(body)), truth).values()) < 1e-5


def assert_drops_only_in_training(body: EncoderBody) -> None:
    body.train()
    assert not torch.allclose(packed_states(body), packed_states(body), atol=1e-2)
    body.eval()
    assert torch.equal(packed_states(body), packed_states(body))


def record_kinds(monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module]) -> list[type]:
    """The types of what these layers return from now on."""
    kinds: list[type] = []
    forward = layer.forward

    def spy(self: nn.Module, *inputs: object, **options: object) -> object:
        kinds.append(type(result := forward(self, *inputs, **options)))
        return result

    monkeypatch.setattr(layer, "forward", spy)
    return kinds
