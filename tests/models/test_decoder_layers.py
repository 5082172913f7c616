"""Fused layers of decoders against transformers' own, on the GPU, or on a CPU that the modules take
for one: Triton's interpreter runs the kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparton.models import attention, body, layers
from sparton.models.body import EncoderBody
from sparton.models.decoder_layers import (
    DECODERS,
    FinalNorm,
    FusedAttention,
    FusedLayer,
    FusedMLP,
)
from sparton.models.residuals import Unsummed
from tests.models import causal_lms
from tests.models.fused_layers import (
    DEVICE,
    HALF,
    adapt,
    distances,
    packed_states,
    record_kinds,
    results,
    stock_states,
)

OURS = {FusedLayer, FusedAttention, FusedMLP, FinalNorm}
MULTIPLIERS = {"residual_multiplier": 0.3, "attention_multiplier": 0.2, "embedding_multiplier": 3.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "granite": MULTIPLIERS,
    "smollm3": {"no_rope_layers": [1, 0]},
}


def build(family: str, attention: str = "causal", **settings: Any) -> Any:
    """A body in which norms and biases are not all alike, and attention not to one token alone."""
    whole = causal_lms.build(family, attention, **SETTINGS.get(family, {}) | settings)
    model: Any = whole.base_model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif "q_proj" in name:
                parameter.mul_(0.3)
    return model.train().to(DEVICE)


@pytest.fixture
def handed_on(monkeypatch) -> list[type]:
    """What layers returned."""
    return record_kinds(monkeypatch, FusedLayer)


def check(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """Gradients that almost cancel, as those of keys' biases, are compared with the largest."""
    assert found.keys() == truth.keys()
    largest = max(float(x.norm()) for x in truth.values())
    for name, x in truth.items():
        assert float((found[name] - x).norm()) < 2e-5 * max(float(x.norm()), 1e-2 * largest), name


@pytest.mark.quick(4)
@pytest.mark.parametrize("adapted", [(), ("k_proj", "gate_proj")], ids=["stock", "adapted"])
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.usefixtures("arithmetic")
def test_they_are_those_of_transformers(family: str, adapted: tuple[str, ...], tokenizer):
    stock, fused = build(family), EncoderBody(build(family), tokenizer).train()
    assert {type(part) for part in fused.modules()} >= OURS
    assert list(fused.model.state_dict()) == list(stock.state_dict())
    for model in (stock, fused.model) if adapted else ():  # queries and others are not
        adapt(model, *adapted)
    truth = results(stock, stock_states(stock))
    check(results(fused, packed_states(fused)), truth)


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_bidirectional_ones_with_windows(family, tokenizer, kernels):
    """Two sequences are longer than the windows."""
    stock, fused = build(family, "bidirectional"), build(family, "bidirectional")
    truth = results(stock, stock_states(stock))
    check(results(fused, packed_states(EncoderBody(fused, tokenizer).train())), truth)


CHANGES: dict[tuple[str, str], Callable[[Any], None]] = {
    ("mistral", "window"): lambda model: setattr(model.layers[1].self_attn, "sliding_window", 2),
    ("llama", "positions"): lambda model: model.rotary_emb.inv_freq.mul_(1.1),
    ("smollm3", "rope"): lambda model: setattr(model.layers[1].self_attn, "use_rope", True),
    ("qwen3", "norm"): lambda model: setattr(
        model.layers[0].self_attn.q_norm, "variance_epsilon", 0.1
    ),
    ("granite", "multiplier"): lambda model: setattr(model.layers[0], "residual_multiplier", 0.31),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize(("family", "change"), CHANGES)
def test_what_layers_read_is_no_rounding_error(family, change, tokenizer, kernels):
    stock, fused = build(family), EncoderBody(build(family), tokenizer).train()
    CHANGES[family, change](fused.model)
    truth = results(stock, stock_states(stock))
    assert max(distances(results(fused, packed_states(fused)), truth).values()) > 1e-4


@pytest.mark.quick(1)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_under_autocast(family, checkpointing, tokenizer, kernels, handed_on, monkeypatch):
    """Residuals stay fp32, and attention gets what products give. At most as far from fp32 as
    transformers' own layers under autocast are."""
    seen: list[torch.dtype] = []
    attend = attention._attend

    def spy(*operands: Any) -> Tensor:
        seen.extend(x.dtype for x in operands[:3])
        return attend(*operands)

    monkeypatch.setattr(attention, "_attend", spy)
    truth = results(stock := build(family), stock_states(stock))
    fused = EncoderBody(build(family), tokenizer, gradient_checkpointing=checkpointing).train()
    with torch.autocast(DEVICE, HALF):
        allowed = distances(results(stock := build(family), stock_states(stock)), truth)
        handed_on.clear()
        seen.clear()
        states = packed_states(fused)
    assert states.dtype == torch.float32
    assert handed_on == [Tensor if checkpointing else Unsummed] * 2
    assert seen == [HALF] * 6
    found = distances(results(fused, states), truth)
    assert all(found[name] <= 1.5 * limit + 1e-3 for name, limit in allowed.items())
    assert max(found.values()) > 1e-4


def test_families_that_stay_as_they_are_attend_in_16_bits(tokenizer, monkeypatch):
    """Rotary positions in fp32 would keep them from FlashAttention."""
    seen: list[torch.dtype] = []
    attend = attention._attend

    def spy(*operands: Any) -> Tensor:
        seen.extend(x.dtype for x in operands[:3])
        return attend(*operands)

    gemma = EncoderBody(causal_lms.build("gemma", "causal").base_model.to(DEVICE), tokenizer)
    assert not {type(part) for part in gemma.modules()} & OURS
    monkeypatch.setattr(attention, "_attend", spy)
    with torch.autocast(DEVICE, torch.bfloat16):
        packed_states(gemma)
    assert seen == [torch.bfloat16] * 6


@pytest.mark.quick(1)
@pytest.mark.parametrize("targets", ["all-linear", ["k_proj", "gate_proj"]])
def test_adapters(targets, tokenizer, kernels, monkeypatch):
    """Of all layers, or of some beside others that are frozen, against transformers' layers."""
    pytest.importorskip("peft")
    lora = {"rank": 4, "dtype": "fp32", "targets": targets}
    found = []
    for fuse in (lambda *_, **__: None, layers.fuse_layers):
        monkeypatch.setattr(body, "fuse_layers", fuse)
        adapted = EncoderBody(build("qwen3"), tokenizer, lora=lora).train()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
        found.append(results(adapted, packed_states(adapted)))
    assert any("lora_B" in name for name in found[0])
    assert not any("base_layer" in name or "norm" in name for name in found[0])
    check(found[1], found[0])


@pytest.mark.usefixtures("arithmetic")
def test_weights_of_16_bits_under_autocast(tokenizer):
    """Frozen ones, as beside adapters: what layers hand on, and what comes out at the end, has the
    dtypes that transformers' layers give it."""
    pytest.importorskip("peft")
    fused = EncoderBody(build("qwen3"), tokenizer, lora={"rank": 4}).train()
    seen: list[Any] = []
    fused.model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.autocast(DEVICE, torch.bfloat16):
        states = packed_states(fused)
    assert seen[0].residual.dtype == seen[0].update.dtype == torch.bfloat16
    assert states.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_share_graphs(family, tokenizer, kernels, graphs):
    deep = {"num_hidden_layers": 4}
    compiled = EncoderBody(build(family, **deep), tokenizer, compile=True).eval()
    eager = EncoderBody(build(family, **deep), tokenizer).eval()
    with torch.autocast(DEVICE, HALF):
        expected = packed_states(eager)
        for _ in range(2):
            assert torch.equal(packed_states(compiled), expected)
    assert graphs.frame_count == 2  # the first layer, which finds embeddings, and the others


@pytest.mark.quick(1)
@pytest.mark.parametrize("settings", [{"hidden_act": "gelu"}, {"mlp_bias": True}])
def test_other_activations_and_biases_of_products(settings, tokenizer, kernels):
    stock, fused = (build("llama", **settings) for _ in range(2))
    truth = results(stock, stock_states(stock))
    check(results(fused, packed_states(EncoderBody(fused, tokenizer).train())), truth)


def test_other_parts_than_transformers_own_stay():
    class Norm(nn.Module):
        weight, variance_epsilon = 1, 1e-6

    for place in ("norm", "layers.1.input_layernorm", "layers.0.self_attn.k_norm"):
        other: PreTrainedModel = build("qwen3")
        other.set_submodule(place, Norm())
        layers.fuse_layers(other)
        assert not {type(part) for part in other.modules()} & OURS
    layers.fuse_layers(stock := build("qwen3"))
    assert {type(part) for part in stock.modules()} >= OURS
