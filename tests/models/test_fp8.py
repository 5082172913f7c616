"""Encoders that multiply in FP8 while they train, on the GPU, or on a CPU that the modules take for
one: Triton's interpreter runs the kernels, and products are those of the twin."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from sparton.kernels.dispatch import has_fp8
from sparton.kernels.encoder_layer import Fp8Operand, fp8_products
from sparton.models import bert_layers, bert_parts
from sparton.models.bert_parts import FusedPart, Intermediate, PostNorm, SelfAttention
from sparton.models.body import EncoderBody
from sparton.models.encoder import Encoder
from sparton.models.fp8 import encoding_in_fp8, multiply_in_fp8
from sparton.models.heads import SpartonHead
from sparton.products import keeping_weights
from sparton.types import TokenBatch
from tests import interpreter
from tests.models import fused_layers
from tests.models.fused_layers import on_gpu

DEVICE = torch.device("cuda" if on_gpu else "cpu")
BF16 = torch.bfloat16
SMALL = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 32, "pad_token_id": 1,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
TEXTS = [[5, 6], [8], [9, 10, 11], [16, 17]]

pytestmark = pytest.mark.skipif(
    on_gpu and not has_fp8(DEVICE), reason="this GPU has no FP8 tensor cores"
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> Iterator[None]:
    if not on_gpu:
        monkeypatch.setattr(bert_parts, "may_follow", lambda x, dense: type(dense) is nn.Linear)
    with nullcontext() if on_gpu else interpreter.rounding():
        yield


@pytest.fixture
def products(monkeypatch) -> list[tuple[int, ...]]:
    """Rows, inputs and outputs of the products in FP8."""
    found = []
    reference = fp8_products.scaled_product_reference

    def spy(x, weight, *others):
        found.append((*x.values.shape, weight.values.shape[0]))
        return reference(x, weight, *others)

    monkeypatch.setattr(fp8_products, "scaled_product_reference", spy)
    return found


def build(tokenizer, model=BertModel, config=BertConfig, *, fp8: bool = True, **options):
    given = [name for name in options if name in SMALL or name.startswith(("hidden", "initial"))]
    settings = {name: options.pop(name) for name in given}
    torch.manual_seed(0)
    body = EncoderBody(model(config(**SMALL | settings)), tokenizer, **options).train().to(DEVICE)
    if fp8:
        multiply_in_fp8(body)
    return body


def states(body: EncoderBody, dtype: torch.dtype = BF16) -> Tensor:
    torch.manual_seed(1)  # of the dropout
    with torch.autocast(DEVICE.type, dtype):
        return body.hidden_states(TokenBatch.from_lists(TEXTS).to(DEVICE)).float()


def results(body: EncoderBody, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    body.zero_grad()
    return fused_layers.results(body, states(body, dtype))


def distances(found: dict[str, Tensor], truth: dict[str, Tensor]) -> list[float]:
    return [*fused_layers.distances(found, truth).values()]


@pytest.mark.slow
@pytest.mark.skipif(on_gpu, reason="counts the products of the twin")
def test_which_products_are_in_fp8(tokenizer, products):
    results(build(tokenizer))
    T, padded = sum(map(len, TEXTS)), 16
    layer = [(T, 32, 96), (T, 32, 32), (T, 32, 48), (T, 48, 32)]
    back = [
        product
        for T, inputs, outputs in reversed(layer)
        for product in ((T, outputs, inputs), (outputs, padded, inputs))
    ]
    assert products == 2 * layer + 2 * back
    products.clear()
    body = build(tokenizer).eval()
    states(body)
    assert not products
    body.train().hidden_states(TokenBatch.from_lists(TEXTS).to(DEVICE))  # without autocast
    assert not products


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("model", "config", "options"),
    [
        (BertModel, BertConfig, {}),
        (RobertaModel, RobertaConfig, {"half_residual": True}),
        (BertModel, BertConfig, {"gradient_checkpointing": True}),
        (BertModel, BertConfig, {"hidden_act": "relu"}),
    ],
    ids=["bert", "half residual", "checkpointing", "relu"],
)
def test_gradients_are_near_those_of_16_bits(tokenizer, model, config, options):
    body = build(tokenizer, model, config, **options)
    truth = results(build(tokenizer, model, config, fp8=False, **options))
    found = distances(results(body), truth)
    assert 0.01 < max(found) < 0.25
    assert sum(found) / len(found) < 0.1
    for part in body.modules():  # a scale of another row
        if isinstance(part, FusedPart):
            weights = [x.weight for x in part.children() if isinstance(x, nn.Linear)]
            for rows in part.fp8(weights)[:2]:
                rows.scales.copy_(rows.scales * torch.linspace(0.5, 2, len(rows.scales)).to(DEVICE))
    assert max(distances(results(body), truth)) > 0.4, "negative control"


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"half_residual": True}, {"gradient_checkpointing": True}],
    ids=["fp32 between layers", "half residual", "checkpointing"],
)
def test_a_layer_as_one_function_is_that_of_its_parts(tokenizer, monkeypatch, options):
    """But for attention, which on a CPU is another one there, and what that rounds."""
    calls, layer = [], bert_layers.post_norm_layer

    def noted(operand, *others):
        calls.append(isinstance(operand, Fp8Operand))
        return layer(operand, *others)  # which is left early where it is computed again

    monkeypatch.setattr(bert_layers, "post_norm_layer", noted)
    if not on_gpu:
        monkeypatch.setattr(bert_layers, "has_short_kernel", lambda x, dtype, width: True)
        monkeypatch.setattr(bert_layers, "may_follow", bert_parts.may_follow)
    body, dtype = build(tokenizer, hidden_dropout_prob=0.1, **options), fused_layers.HALF
    parts = results(body, dtype)
    assert not calls
    with keeping_weights(body):
        whole = results(body, dtype)
    assert calls == [True] * (4 if "gradient_checkpointing" in options else 2)
    found = distances(whole, parts)
    assert sum(found) / len(found) < 0.01
    with keeping_weights(body):
        other = results(build(tokenizer, hidden_dropout_prob=0.12, **options), dtype)
    assert sum(distances(other, parts)) / len(found) > 0.1, "negative control"


@pytest.mark.slow
def test_layers_that_are_computed_again_give_the_same_gradients(tokenizer):
    dropout = 0.3
    kept = results(build(tokenizer, hidden_dropout_prob=dropout))
    again = results(build(tokenizer, hidden_dropout_prob=dropout, gradient_checkpointing=True))
    # What is between two layers is rounded where it is read, and its gradients are added in fp32.
    assert max(distances(again, kept)) < 0.02
    assert max(distances(results(build(tokenizer, hidden_dropout_prob=dropout)), kept)) < 1e-3
    assert max(distances(results(build(tokenizer)), kept)) > 0.2, "negative control"


@pytest.mark.slow
def test_evaluation_is_that_of_16_bits(tokenizer):
    body, plain = build(tokenizer), build(tokenizer, fp8=False)
    assert not torch.equal(states(body), states(plain))
    assert torch.equal(states(body.eval()), states(plain.eval()))
    assert list(body.state_dict()) == list(plain.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("hidden_act", ["gelu", "relu"])
def test_encoding_in_fp8_is_near_that_of_16_bits(tokenizer, products, hidden_act):
    plain = build(tokenizer, fp8=False, hidden_act=hidden_act, initializer_range=0.2).eval()
    with torch.no_grad():
        truth = states(plain)
        assert not products
        with encoding_in_fp8(plain):
            found = states(plain)
            assert on_gpu or len(products) == 2 * 4
            for part in plain.modules():
                if isinstance(part, PostNorm):
                    rows = part.encoding_fp8([part.dense.weight]).outputs
                    rows.scales.mul_(torch.linspace(0.5, 2, len(rows.scales)).to(DEVICE))
            spoiled = states(plain)
        products.clear()
        assert torch.equal(states(plain), truth) and not products
    assert 0.001 < float((found - truth).norm() / truth.norm()) < 0.12
    assert float((spoiled - truth).norm() / truth.norm()) > 0.4, "negative control"


def test_heads_look_for_their_maxima_in_fp8_while_encoding(tokenizer):
    plain, without = SpartonHead(), SpartonHead(token_topk=4)
    model = nn.ModuleList([build(tokenizer, fp8=False), plain, without, SpartonHead(fp8=True)])
    with encoding_in_fp8(model):
        assert [head.fp8 for head in model[1:]] == [True, False, True]
    assert [head.fp8 for head in model[1:]] == [False, False, True]


@pytest.mark.slow
def test_encoding_in_fp8_has_gradients_where_they_are_asked_for(tokenizer):
    body, plain = (build(tokenizer, fp8=False).eval() for _ in range(2))
    truth = results(plain)
    with encoding_in_fp8(body):
        found = distances(results(body), truth)
    assert 0.01 < max(found) < 0.25


@pytest.mark.slow
def test_weights_that_change_are_seen_and_frozen_ones_have_no_gradient(tokenizer):
    body = build(tokenizer)
    before = states(body).detach()
    assert torch.equal(states(body), before)
    for name, parameter in body.named_parameters():
        parameter.requires_grad_("key" not in name and "intermediate" not in name)
    optimizer = torch.optim.SGD([p for p in body.parameters() if p.requires_grad], lr=0.1)
    found = results(body)
    assert not any("key" in name or "intermediate" in name for name in found)
    optimizer.step()
    after = states(body).detach()
    assert float((after - before).norm() / before.norm()) > 0.05
    fresh = build(tokenizer)
    fresh.load_state_dict(body.state_dict())
    assert torch.equal(states(fresh), after)


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu, reason="takes a minute in the interpreter")
def test_a_small_model_learns_as_in_16_bits(tokenizer):
    """It is told which of two texts it sees."""
    losses = {}
    for fp8 in (True, False):
        body = build(tokenizer, fp8=fp8)
        optimizer = torch.optim.AdamW(body.parameters(), lr=3e-3)
        curve = []
        for _ in range(6):
            first = states(body)[[0, 2, 3, 6]]
            logits = first @ first.t() / 32**0.5
            loss = nn.functional.cross_entropy(
                logits[:, [1, 0, 3, 2]], torch.arange(4, device=DEVICE)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        losses[fp8] = torch.tensor(curve)
    assert losses[False][-1] < 0.5 * losses[False][0]
    assert (losses[True] - losses[False]).abs().max() < 0.1 * losses[False][0]
    assert not torch.equal(*losses.values())


class Table(Encoder):
    """An encoder without a transformer."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: Table(), "of a transformer, and Table has none: take bf16"),
        (lambda body: setattr(body, "lora", object()), "no products with adapters"),
        (lambda body: body.model.encoder.layer[0].compile(), "with compile=False, or take bf16"),
    ],
)
def test_what_fp8_does_not_serve_is_refused(tokenizer, change, message):
    body = build(tokenizer, fp8=False)
    changed = change(body)
    with pytest.raises(ValueError, match=message):
        multiply_in_fp8(changed or body)


def test_other_layers_and_odd_sizes_are_refused(tokenizer, build_mlm):
    other = EncoderBody(build_mlm("distilbert"), tokenizer)
    with pytest.raises(ValueError, match=r"of bert, roberta, .* DistilBertForMaskedLM has others"):
        multiply_in_fp8(other)
    with pytest.raises(ValueError, match=r"multiples of 16, and BertModel .* of 32 inputs and 40"):
        build(tokenizer, intermediate_size=40)


def test_parts_are_those_of_the_layers(tokenizer):
    parts = [part for part in build(tokenizer).modules() if isinstance(part, FusedPart)]
    assert {type(part) for part in parts} == {SelfAttention, PostNorm, Intermediate}
    assert len(parts) == 8 and all(part.fp8 is not None for part in parts)
