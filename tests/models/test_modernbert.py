"""Fused layers of ModernBERT against transformers' own, on the GPU, or on a CPU that the modules
take for one: Triton's interpreter runs the kernels."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, ModernBertConfig, ModernBertModel

from sparton.models import attention, layers, residuals
from sparton.models.body import EncoderBody
from sparton.models.modernbert import FinalNorm, FusedAttention, FusedLayer, FusedMLP
from sparton.models.residuals import Unsummed
from tests.models.fused_layers import (
    DEVICE,
    HALF,
    Adapted,
    adapt,
    assert_drops_only_in_training,
    assert_same,
    distances,
    on_gpu,
    packed_states,
    record_kinds,
    results,
    stock_states,
)

# Two layers see all tokens, and two those at a distance of up to 2: two sequences are longer.
SMALL = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 64, "local_attention": 4,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip
OURS = {FusedLayer, FusedAttention, FusedMLP, FinalNorm}


def build(**settings) -> nn.Module:
    """With weights so large that attention matters, and norms that are not all alike."""
    torch.manual_seed(0)
    model = ModernBertModel(ModernBertConfig(**SMALL | settings)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
            else:
                parameter.uniform_(0.5, 1.5)
    return model.to(DEVICE)


@pytest.fixture
def handed_on(monkeypatch) -> list[type]:
    """What layers returned."""
    return record_kinds(monkeypatch, FusedLayer)


@pytest.mark.parametrize("change", [None, adapt], ids=["stock", "adapted"])
@pytest.mark.usefixtures("arithmetic")
def test_they_are_those_of_transformers(change: Callable | None, tokenizer):
    stock, body = build(), EncoderBody(build(), tokenizer).train()
    assert {type(part) for part in body.modules()} >= OURS
    assert list(body.model.state_dict()) == list(stock.state_dict())
    if change:
        change(stock)
        change(body.model)
    assert_same(body, stock)


@pytest.mark.quick(1)
@pytest.mark.parametrize("change", ["window", "positions"])
def test_another_window_or_position_is_no_rounding_error(change, tokenizer, kernels):
    stock, body = build(), EncoderBody(build(), tokenizer).train()
    for layer in body.model.layers if change == "window" else ():
        if layer.attn.sliding_window is not None:
            layer.attn.sliding_window += 1
    if change == "positions":
        body.model.rotary_emb.sliding_attention_inv_freq *= 1.1
    truth = results(stock, stock_states(stock))
    assert min(distances(results(body, packed_states(body)), truth).values()) > 1e-4


@pytest.mark.quick(1)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_under_autocast_residuals_stay_fp32(checkpointing, tokenizer, kernels, handed_on):
    """At most as far from fp32 as transformers' own layers under autocast are."""
    truth = results(stock := build(), stock_states(stock))
    with torch.autocast(DEVICE, HALF):
        allowed = distances(results(stock := build(), stock_states(stock)), truth)
        body = EncoderBody(build(), tokenizer, gradient_checkpointing=checkpointing).train()
        states = packed_states(body)
    assert states.dtype == torch.float32
    assert handed_on == [Tensor if checkpointing else Unsummed] * 4
    found = distances(results(body, states), truth)
    assert all(found[name] <= 1.2 * limit + 1e-4 for name, limit in allowed.items())
    assert max(found.values()) > 1e-4


@pytest.mark.slow
def test_half_residuals(tokenizer, kernels, monkeypatch):
    seen: list[torch.dtype] = []
    pre_norm = residuals.pre_norm

    def spy(x: Tensor, residual: Tensor, gain: Tensor, **options: object) -> tuple:
        seen.append(residual.dtype)
        return pre_norm(x, residual, gain, **options)

    monkeypatch.setattr(residuals, "pre_norm", spy)
    for half, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        seen.clear()
        body = EncoderBody(build(), tokenizer, half_residual=half)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert packed_states(body).dtype == dtype
        assert seen == [dtype] * 8  # but for the first layer, two each, and the last norm


def test_half_residuals_without_kernels_and_with_checkpoints(tokenizer):
    body = EncoderBody(build(), tokenizer, half_residual=True, gradient_checkpointing=True).train()
    with torch.autocast(DEVICE, torch.bfloat16):
        states = packed_states(body)
    assert states.dtype == torch.bfloat16
    exact = packed_states(EncoderBody(build(), tokenizer))
    assert float((states.float() - exact).norm() / exact.norm()) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("short", [512, 0])
def test_local_layers_tell_our_attention_their_window(short, tokenizer, kernels, monkeypatch):
    """Longer sequences go to FlashAttention, which a CPU has not."""
    windows = []
    attend = attention.varlen_self_attention

    def spy(*operands: object, window: int | None, **options: object) -> Tensor:
        windows.append(window)
        return attend(*operands, window=window, **options)

    monkeypatch.setattr(attention, "varlen_self_attention", spy)
    monkeypatch.setattr(attention, "SHORT", short)
    if not on_gpu:
        monkeypatch.setattr(attention, "has_short_kernel", lambda x, dtype, width: dtype == HALF)
    truth = results(stock := build(), stock_states(stock))
    with torch.autocast(DEVICE, HALF):
        allowed = distances(results(stock := build(), stock_states(stock)), truth)
        body = EncoderBody(build(), tokenizer).train()
        windows.clear()
        found = distances(results(body, packed_states(body)), truth)
    assert windows == ([None, 2, 2, None] if short else [])
    assert all(found[name] <= 1.5 * limit + 1e-4 for name, limit in allowed.items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_layers_share_graphs(dtype, tokenizer, kernels, graphs):
    body = EncoderBody(build(), tokenizer, compile=True).eval()
    eager = EncoderBody(build(), tokenizer).eval()
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        expected = packed_states(eager)
        for _ in range(2):
            assert torch.equal(packed_states(body), expected)
    # Embeddings, the first layer, which has no norm, those with a window, and those without.
    assert graphs.frame_count == 4


def test_dropout_drops_only_in_training(tokenizer):
    assert_drops_only_in_training(EncoderBody(build(mlp_dropout=0.5), tokenizer))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"hidden_activation": "silu"}, {"mlp_bias": True}])
def test_other_activations_and_biases_of_products(settings, tokenizer, kernels):
    assert_same(EncoderBody(build(**settings), tokenizer).train(), build(**settings))


def test_other_parts_than_transformers_own_stay(tokenizer):
    class Norm(nn.LayerNorm):
        pass

    other = build()
    other.layers[2].mlp_norm = Norm(32, bias=False)
    for model in (other, build(norm_bias=True)):
        layers.fuse_layers(model)
        assert not {type(part) for part in model.modules()} & OURS
    assert_same(EncoderBody(build(norm_bias=True), tokenizer).train(), build(norm_bias=True))
    replaced = build()
    replaced.layers[1].attn.Wo = Adapted(32, 32, bias=False).to(DEVICE)
    layers.fuse_layers(replaced)
    assert {type(part) for part in replaced.modules()} >= OURS, "their own forwards are called"


def test_folders_are_transformers_own(tokenizer, tmp_path: Path):
    stock = copy.deepcopy(build()).eval()
    body = EncoderBody(build(), tokenizer).eval()
    body.save(tmp_path)
    again = AutoModel.from_pretrained(tmp_path).eval().to(DEVICE)
    assert type(again) is ModernBertModel and not {type(x) for x in again.modules()} & OURS
    expected = stock_states(stock)
    torch.testing.assert_close(stock_states(again), expected)
    assert not torch.allclose(stock_states(build(num_attention_heads=4)), expected, atol=1e-2)
    read = EncoderBody(again, tokenizer).eval()
    torch.testing.assert_close(packed_states(read), expected, rtol=1e-5, atol=1e-5)
