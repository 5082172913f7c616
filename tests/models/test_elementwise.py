"""Modules between the matrix products; torch.compile needs a C++ compiler."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CamembertConfig,
    CamembertModel,
    ElectraConfig,
    ElectraModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from sparton.models import elementwise
from sparton.models.elementwise import (
    BiasGelu,
    FusedDropout,
    HalfLayerNorm,
    PostNorm,
    fuse_layers,
    replace_dropout,
    replace_layer_norms,
)

SIZE = 300, 768
needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU"
)


@pytest.mark.slow
def test_compiled_gradients_follow_the_mask_and_seeds_repeat():
    torch._dynamo.reset()
    dropout = FusedDropout(0.1)
    compiled = torch.compile(lambda x: dropout(x) + 1.0, dynamic=True)
    for rows in (7, 300):
        x = torch.ones(rows, 64, requires_grad=True)
        torch.manual_seed(3)
        with torch.no_grad():
            first = compiled(x)
        torch.manual_seed(3)
        second = compiled(x)
        assert torch.equal(first, second)
        second.sum().backward()
        assert torch.equal(x.grad == 0, second == 1.0)
        assert 0.02 < (x.grad == 0).double().mean().item() < 0.25
    dropout.eval()
    assert torch.equal(compiled(x), x + 1.0)


def test_in_eager_mode_it_is_the_dropout_of_pytorch():
    x = torch.ones(SIZE)
    torch.manual_seed(1)
    own = FusedDropout(0.3)(x)
    torch.manual_seed(1)
    assert torch.equal(own, nn.Dropout(0.3)(x))


def test_norms_are_half_precision_only_under_bfloat16_autocast():
    norm, x = HalfLayerNorm(16), torch.randn(5, 16)
    plain = nn.LayerNorm(16)(x)
    assert torch.equal(norm(x), plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x), plain.to(torch.bfloat16))
        assert norm(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert norm(x).dtype == nn.LayerNorm(16)(x).dtype


def test_replacing_keeps_parameters_and_their_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.2))
    model.append(nn.Sequential(nn.LayerNorm(4, bias=False), nn.Dropout(0.0)))
    before, x = dict(model.named_parameters()), torch.randn(3, 4)
    model.eval()
    expected = model(x)
    replace_dropout(model)
    replace_layer_norms(model)
    assert {type(part) for part in model.modules() if not list(part.children())} == {
        nn.Linear,
        HalfLayerNorm,
        FusedDropout,
    }
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert torch.equal(model(x), expected)
    assert model[2].p == 0.2


FAMILIES = [
    (BertModel, BertConfig),
    (RobertaModel, RobertaConfig),
    (XLMRobertaModel, XLMRobertaConfig),
    (CamembertModel, CamembertConfig),
    (ElectraModel, ElectraConfig),
]
SMALL = {
    "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 32, "pad_token_id": 1,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def build(model: type[nn.Module], config: type, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    return model(config(**SMALL | settings, attn_implementation="eager")).train()


def states_and_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.arange(2, 18).view(2, 8)
    states = model(input_ids=ids).last_hidden_state
    weights = torch.linspace(-1, 1, states.numel(), device=states.device).view_as(states)
    (states * weights).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return {"states": states.detach()} | {k: v for k, v in gradients.items() if v is not None}


def kinds_of(model: nn.Module) -> set[type]:
    return {type(part) for part in model.modules()} & {PostNorm, BiasGelu}


@pytest.fixture
def kernels_on_cpu(monkeypatch):
    """As if a CPU were a GPU; Triton's interpreter runs the kernels."""
    monkeypatch.setattr(elementwise, "_has_kernels", lambda x, dense: type(dense) is nn.Linear)


@needs_interpreter
@pytest.mark.parametrize(("model", "config"), FAMILIES)
def test_fused_layers_are_those_of_transformers(model, config, kernels_on_cpu):
    stock, fused = build(model, config), build(model, config)
    fuse_layers(fused)
    assert kinds_of(fused) == {PostNorm, BiasGelu}
    assert list(fused.state_dict()) == list(stock.state_dict())
    expected, found = states_and_gradients(stock), states_and_gradients(fused)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-5), name


@needs_interpreter
def test_fused_dropout_drops_only_in_training(kernels_on_cpu):
    model = build(BertModel, BertConfig, hidden_dropout_prob=0.5)
    fuse_layers(model)
    first, second = (states_and_gradients(model)["states"] for _ in range(2))
    assert not torch.allclose(first, second, atol=1e-2)
    model.eval()
    first, second = (states_and_gradients(model)["states"] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("activation", ["relu", "gelu_new", "gelu_pytorch_tanh", "silu"])
def test_other_activations_stay(activation):
    model = build(BertModel, BertConfig, hidden_act=activation)
    fuse_layers(model)
    assert kinds_of(model) == {PostNorm}


def test_other_parts_than_transformers_own_stay():
    class Adapted(nn.Linear):
        """What an adapter does to a linear layer."""

    model = build(BertModel, BertConfig)
    for layer in model.encoder.layer:
        layer.output.dense = Adapted(40, 24)
        layer.intermediate.dense = nn.Linear(24, 40, bias=False)
    fuse_layers(model)
    layers = model.encoder.layer
    assert all(type(layer.output).__name__ == "BertOutput" for layer in layers)
    assert all(type(layer.intermediate).__name__ == "BertIntermediate" for layer in layers)
    assert all(type(layer.attention.output) is PostNorm for layer in layers)
    layers[0].attention.output.dense = Adapted(24, 24)
    assert not elementwise._has_kernels(torch.ones(1), layers[0].attention.output.dense)
