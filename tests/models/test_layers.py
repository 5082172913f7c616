"""Layers with few passes over memory against transformers' own, on the GPU, or on a CPU that the
modules take for one: Triton's interpreter runs the kernels."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
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

from sparton.kernels.encoder_layer import Fp8Operand
from sparton.kernels.post_norm_layer import Operand
from sparton.models import bert_layers
from sparton.models.bert_parts import Intermediate, LayerStates, PostNorm, SelfAttention
from sparton.models.body import EncoderBody
from sparton.models.layers import fuse_layers
from sparton.products import keeping_weights
from sparton.types import TokenBatch, TokenRows
from tests.models.fused_layers import (
    DEVICE,
    HALF,
    LENGTHS,
    Adapted,
    adapt,
    assert_drops_only_in_training,
    assert_same,
    distances,
    on_gpu,
    packed_states,
    record_kinds,
    results,
    sequences,
    stock_states,
)

FAMILIES = [
    (BertModel, BertConfig),
    (RobertaModel, RobertaConfig),
    (XLMRobertaModel, XLMRobertaConfig),
    (CamembertModel, CamembertConfig),
    (ElectraModel, ElectraConfig),
]
SMALL = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 32, "pad_token_id": 1,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
OURS = {PostNorm, Intermediate, SelfAttention}


def build(model: type[nn.Module] = BertModel, config: type = BertConfig, **settings) -> nn.Module:
    torch.manual_seed(0)
    return model(config(**SMALL | settings)).train().to(DEVICE)


@pytest.fixture
def whole(kernels, monkeypatch) -> list[int]:
    """The tokens of the calls of the function of a whole layer, which a CPU has, too."""
    calls: list[int] = []
    layer = bert_layers.post_norm_layer

    def counted(operand: Operand, *others: object) -> tuple:
        calls.append(len(operand.wide if isinstance(operand, Fp8Operand) else operand))
        return layer(operand, *others)

    monkeypatch.setattr(bert_layers, "post_norm_layer", counted)
    if not on_gpu:
        monkeypatch.setattr(bert_layers, "has_short_kernel", lambda x, dtype, width: True)
    return calls


@pytest.fixture
def handed_on(monkeypatch) -> list[type]:
    """What the ends of layers returned."""
    return record_kinds(monkeypatch, PostNorm)


@pytest.mark.quick(2)
@pytest.mark.parametrize("change", [None, adapt], ids=["stock", "adapted"])
@pytest.mark.parametrize(("model", "config"), FAMILIES)
def test_they_are_those_of_transformers(
    model: type[nn.Module],
    config: type,
    change: Callable[[nn.Module], None] | None,
    tokenizer,
    kernels,
):
    stock, body = build(model, config), EncoderBody(build(model, config), tokenizer).train()
    assert {type(part) for part in body.modules()} >= OURS
    assert list(body.model.state_dict()) == list(stock.state_dict())
    if change:
        change(stock)
        change(body.model)
    assert_same(body, stock)


@pytest.mark.quick(1)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_under_autocast_residuals_stay_fp32(checkpointing, tokenizer, kernels, handed_on):
    """About as far from fp32 as transformers' own layers under autocast are. (Both are errors of
    rounding, some of them of 32 numbers.)"""
    truth = results(stock := build(), stock_states(stock))
    with torch.autocast(DEVICE, HALF):
        allowed = distances(results(stock := build(), stock_states(stock)), truth)
        body = EncoderBody(build(), tokenizer, gradient_checkpointing=checkpointing).train()
        handed_on.clear()
        states = packed_states(body)
    assert states.dtype == torch.float32
    assert handed_on == [LayerStates, Tensor if checkpointing else LayerStates] * 2
    found = distances(results(body, states), truth)
    too_far = {
        name: (found[name], limit)
        for name, limit in allowed.items()
        if found[name] > 1.5 * limit + 1e-4
    }
    assert not too_far
    assert max(found.values()) > 1e-4


def test_half_residuals_are_handed_on_once(tokenizer, kernels, handed_on):
    body = EncoderBody(build(), tokenizer, half_residual=True)
    handed_on.clear()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert packed_states(body).dtype == torch.bfloat16
    assert handed_on == [Tensor] * 4


@pytest.mark.parametrize(
    "settings", [{}, {"half_residual": True}, {"gradient_checkpointing": True}]
)
def test_one_function_does_what_the_parts_of_a_layer_do(settings, tokenizer, whole):
    def found(weights: AbstractContextManager) -> dict[str, Tensor]:
        body = EncoderBody(build(hidden_dropout_prob=0.1), tokenizer, **settings).train()
        torch.manual_seed(1)
        with torch.autocast(DEVICE, HALF), weights:
            return results(body, packed_states(body))

    parts, calls = found(nullcontext()), list(whole)
    one = found(keeping_weights(nn.Linear(1, 1)))
    assert calls == [] and set(whole) == {sum(LENGTHS)}
    assert len(whole) == (4 if "gradient_checkpointing" in settings else 2)
    # On a CPU the parts attend by another function, on a GPU in fewer digits.
    assert max(distances(one, parts).values()) < 8e-3


def test_a_whole_layer_encodes_as_its_parts_do(tokenizer, whole):
    body = EncoderBody(build(hidden_dropout_prob=0.1), tokenizer).eval()
    with torch.no_grad(), torch.autocast(DEVICE, HALF):
        parts = packed_states(body)
        with keeping_weights(body):
            one = packed_states(body)
    assert len(whole) == 2
    assert torch.allclose(one, parts, atol=3e-2 if on_gpu else 4e-3)  # of GELU's two forms


@pytest.mark.parametrize("watched", ["nothing", "result", "operand", "everything"])
def test_encoding_writes_over_states_that_nobody_else_has(watched, tokenizer, whole, monkeypatch):
    """Those between two layers, unless a hook has them."""
    stayed, layer = [], bert_layers.post_norm_layer

    def noted(operand: Operand, residual: Tensor, *others: object) -> tuple:
        before = residual.clone()
        result = layer(operand, residual, *others)
        stayed.append(torch.equal(residual, before))
        return result

    monkeypatch.setattr(bert_layers, "post_norm_layer", noted)
    body = EncoderBody(build(), tokenizer).eval()
    first, second = body.model.encoder.layer
    hooks = {
        "nothing": lambda hook: first.register_forward_pre_hook(hook),
        "result": lambda hook: first.register_forward_hook(hook),
        "operand": lambda hook: second.register_forward_pre_hook(hook),
        "everything": lambda hook: nn.modules.module.register_module_forward_hook(hook),
    }
    with torch.no_grad(), torch.autocast(DEVICE, torch.float16), keeping_weights(body):
        alone = packed_states(body)
        hook = hooks[watched](lambda *_: None)
        try:
            assert torch.allclose(packed_states(body), alone, atol=4e-3)
        finally:
            hook.remove()
    assert stayed == [True, False, True, watched != "nothing"]


def check_recomputation(tokenizer, whole: list[int], backward: Callable[[Tensor], object]) -> None:
    body = EncoderBody(build(), tokenizer, gradient_checkpointing=True).train()
    with torch.autocast(DEVICE, HALF), keeping_weights(body):
        backward(packed_states(body).float().square().sum())
    assert whole == [sum(LENGTHS)] * 4


def test_a_backward_in_another_thread_computes_whole_layers_again(tokenizer, whole):
    """As autograd's own thread does it on a GPU."""
    with ThreadPoolExecutor(1) as thread:
        check_recomputation(tokenizer, whole, lambda x: thread.submit(x.backward).result())


@pytest.mark.gpu
def test_so_does_the_thread_of_a_gpu(tokenizer, whole):
    check_recomputation(tokenizer, whole, Tensor.backward)


@pytest.mark.parametrize("other", ["activation", "adapter", "length", "keys", "fp32", "weights"])
def test_a_layer_with_another_part_runs_part_by_part(other, tokenizer, whole, monkeypatch):
    body = EncoderBody(
        build(hidden_act="relu" if other == "activation" else "gelu"), tokenizer
    ).eval()
    if other == "adapter":
        adapt(body.model)
    if other == "length":
        monkeypatch.setattr(bert_layers, "SHORT", max(LENGTHS) - 1)
    tokens = TokenBatch.from_lists([ids.tolist() for ids in sequences()]).to(DEVICE)
    if other == "keys":
        tokens = tokens._replace(keys=TokenRows(tokens.input_ids.argsort(), tokens.cu_seqlens, 9))
    cast = torch.autocast(DEVICE, HALF, enabled=other != "fp32")
    with cast, nullcontext() if other == "weights" else keeping_weights(body):
        body.hidden_states(tokens)
    assert not whole


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), HALF])
def test_layers_share_one_graph(dtype, tokenizer, kernels, graphs):
    body = EncoderBody(build(), tokenizer, compile=True).eval()
    eager = EncoderBody(build(), tokenizer).eval()
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        for _ in range(2):
            assert torch.equal(packed_states(body), packed_states(eager))
    assert graphs.frame_count == 3  # embeddings, all layers, and the pooler of BertModel


def test_dropout_drops_only_in_training(tokenizer, kernels):
    assert_drops_only_in_training(EncoderBody(build(hidden_dropout_prob=0.5), tokenizer))


@pytest.mark.parametrize("activation", ["relu", "gelu_new", "gelu_pytorch_tanh", "silu"])
def test_other_activations(activation, tokenizer, kernels):
    stock = build(hidden_act=activation)
    assert_same(EncoderBody(build(hidden_act=activation), tokenizer).train(), stock)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.output, "dense", Adapted(40, 32)),
        lambda layer: layer.add_module("crossattention", nn.Identity()),
        lambda layer: setattr(layer, "__class__", type("Layer", (type(layer),), {})),
    ],
)
def test_other_parts_than_transformers_own_stay(change):
    model = build()
    change(model.encoder.layer[1])
    fuse_layers(model)
    assert not {type(part) for part in model.modules()} & OURS
    assert type(model.encoder).__name__ == "BertEncoder"
    del model.encoder.layer[1]
    fuse_layers(model)
    assert {type(part) for part in model.modules()} >= OURS
    fuse_layers(build(num_hidden_layers=0))


def test_frozen_parts_have_no_gradients(tokenizer, kernels):
    stock, body = build(), EncoderBody(build(), tokenizer).train()
    for module in (stock, body):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("key" not in name and "value" not in name)
    truth = results(stock, stock_states(stock))
    assert not any("value" in name for name in truth)
    assert max(distances(results(body, packed_states(body)), truth).values()) < 1e-5
