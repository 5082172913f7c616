"""Adapters of linear layers: what they compute, what learns, and in which numbers.

The other side of each comparison is peft, around transformers' own model, given every text by
itself.
"""

import copy
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparton.evaluation.models import packed_tokenizer
from sparton.models import bert_parts
from sparton.models.assembly import build_encoder
from sparton.models.backbone import Backbone
from sparton.models.backbones import pretrained, random_bert, tiny
from sparton.models.body import EncoderBody
from sparton.models.colbert import ColbertHead
from sparton.models.csr import AutoencoderHead
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.lora import Lora
from sparton.models.lora import merged as merged_copy
from sparton.retrieval.encoding import check_precision, encode_texts, usual_precision
from tests.models.alone import alone, batch, close, gradients
from tests.models.test_causal_lm import build

LENGTHS = (3, 1, 30, 2, 17)
FP32 = {"rank": 4, "alpha": 6, "dtype": "fp32"}
DECODERS = ("gemma2", "gpt_neox", "llama", "qwen3")


@torch.no_grad()
def learn(model: nn.Module) -> nn.Module:
    """Adapters that are not zero any more; equal names get equal values."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            seed = sum(map(ord, name.partition("layer")[2]))
            generator = torch.Generator().manual_seed(seed)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def by_peft(model: PreTrainedModel, targets: Any = "all-linear") -> PreTrainedModel:
    """peft's own adapters in transformers' own model."""
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets)
    return learn(peft.get_peft_model(model, config).get_base_model())


def named_gradients(found: dict[str, Tensor]) -> dict[str, Tensor]:
    assert found and all(".lora_" in name for name in found)
    return found


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    return max(float((found[name] - each).abs().max()) for name, each in expected.items()) / largest


def far(found: Tensor, truth: Tensor) -> float:
    return float((found.detach().float() - truth.detach()).norm() / truth.detach().norm())


def assert_as_peft(backbone: Backbone, other: PreTrainedModel, stock: PreTrainedModel) -> None:
    tokens = batch(LENGTHS)
    expected, found = alone(other, tokens), backbone.decoder(backbone(tokens))
    assert close(found, expected)
    assert not close(alone(stock, tokens), expected)
    wanted = named_gradients(gradients(other, expected))
    with backbone.decoder_in_place() as whole:
        given = named_gradients(gradients(whole, found))
    assert distance(given, wanted) < 1e-5
    assert distance({name: 1.01 * each for name, each in given.items()}, wanted) > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_encoders_with_adapters_are_those_of_peft(family, checkpointing, build_mlm, tokenizer):
    backbone = Backbone(
        build_mlm(family), tokenizer, lora=FP32, gradient_checkpointing=checkpointing
    )
    learn(backbone).train()  # layers are computed again in training alone
    for part in backbone.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    assert_as_peft(backbone, by_peft(build_mlm(family)), build_mlm(family))


@pytest.mark.parametrize("architecture", DECODERS)
def test_decoders_with_adapters_are_those_of_peft(architecture, tokenizer):
    backbone = Backbone(build(architecture, "bidirectional"), tokenizer, lora=FP32)
    learn(backbone)
    stock, other = (build(architecture, "bidirectional") for _ in range(2))
    assert_as_peft(backbone, by_peft(other), stock)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_layers_with_adapters_compile_without_a_break(kind, build_mlm, tokenizer, graphs):
    found = []
    for compiled in (False, True):
        model = build("llama", "bidirectional") if kind == "llama" else build_mlm("bert")
        backbone = Backbone(model, tokenizer, lora=FP32 | {"dropout": 0.1}, compile=compiled)
        found.append(learn(backbone).eval()(batch(LENGTHS)))
        assert bool(graphs.frame_count) == compiled
    assert close(*found)


@pytest.mark.quick(1)
@pytest.mark.parametrize("targets", ["all-linear", ["query", "value"], ["output.dense"]])
@pytest.mark.parametrize("ignoring", [False, True])
def test_fused_layers_pass_over_no_adapter(
    targets, ignoring, build_mlm, tokenizer, monkeypatch, request
):
    """Kernels that follow a product with a weight must not follow one with an adapted weight: were
    they to, the difference would be seen."""
    monkeypatch.setattr(
        bert_parts, "may_follow", lambda x, dense: ignoring or type(dense) is nn.Linear
    )
    if ignoring:
        monkeypatch.setattr(bert_parts, "linear", _linear_without_adapters)
    backbone = Backbone(build_mlm("bert"), tokenizer, lora=FP32 | {"targets": targets})
    learn(backbone)
    kinds = {type(part) for part in backbone.modules()}
    assert {bert_parts.PostNorm, bert_parts.Intermediate, bert_parts.SelfAttention} <= kinds
    tokens, other = batch(LENGTHS), by_peft(build_mlm("bert"), targets)
    assert close(backbone.decoder(backbone(tokens)), alone(other, tokens)) != ignoring


def _linear_without_adapters(x: Tensor, *parts: Any, bias: bool = True) -> Tensor:
    each = ((part.weight, part.bias if bias else None) for part in parts)
    return torch.cat([nn.functional.linear(x, *of_part) for of_part in each], dim=-1)


@pytest.mark.parametrize("tied", [True, False])
def test_nothing_but_adapters_learns_and_the_head_makes_no_gradient_of_its_weight(
    tied, tokenizer, monkeypatch
):
    wanted: list[bool] = []
    backward = "sparton.kernels.splade_head.function.splade_head_backward_cpu"
    stock = __import__(backward.rpartition(".")[0], fromlist=["_"]).splade_head_backward_cpu

    def spy(*operands: Any, **options: Any) -> Any:
        wanted.append(options["need_weight"])
        return stock(*operands, **options)

    monkeypatch.setattr(backward, spy)
    for lora in (FP32, None):
        model = build("llama", "bidirectional", tie_word_embeddings=tied)
        encoder = build_encoder(Backbone(model, tokenizer, lora=lora), SpartonHead())
        assert (encoder.backbone.decoder.weight is model.get_input_embeddings().weight) == tied
        encoder(batch(LENGTHS)).sum().backward()
        names = {name for name, p in encoder.named_parameters() if p.grad is not None}
        learning = {name for name, p in encoder.named_parameters() if p.requires_grad}
        assert names == learning
        assert all(".lora_" in name for name in names) == (lora is not None)
    assert wanted == [False, True]


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_every_head_gives_adapters_the_gradient_of_the_eager_one(pooling, tokenizer):
    found = []
    for head in (EagerHead(pooling), SpartonHead(pooling)):
        backbone = Backbone(build("llama", "bidirectional"), tokenizer, lora=FP32)
        encoder = learn(build_encoder(backbone, head))
        found.append(named_gradients(gradients(encoder, encoder(batch(LENGTHS)))))
    assert distance(*found) < 1e-5


def test_what_is_beside_the_backbone_learns_too(tokenizer):
    body = Backbone(build("llama", "bidirectional"), tokenizer, lora=FP32)
    encoder = build_encoder(body, ColbertHead(16))
    learning = {name for name, p in encoder.named_parameters() if p.requires_grad}
    assert {name for name in learning if ".lora_" not in name} == {"projection.weight"}
    assert len(learning) == 1 + 2 * 2 * 7  # A and B of seven matrices of two layers
    rows = encoder.backbone.num_embeddings
    assert rows == 62 and not encoder.backbone.model.get_input_embeddings().weight.requires_grad


def test_a_frozen_backbone_with_adapters_is_refused(tokenizer):
    body = Backbone(build("llama", "bidirectional"), tokenizer, lora=FP32)
    with pytest.raises(ValueError, match=r"freeze_backbone=True would freeze adapters"):
        build_encoder(body, AutoencoderHead(64))
    encoder = build_encoder(body, AutoencoderHead(64, freeze_backbone=False))
    assert any(".lora_" in name for name, p in encoder.named_parameters() if p.requires_grad)


def test_frozen_matrices_are_bf16_and_all_else_is_fp32(build_mlm, tokenizer):
    backbone = Backbone(build_mlm("bert"), tokenizer, lora={"rank": 4})
    for name, parameter in backbone.named_parameters():
        is_half = parameter.ndim > 1 and ".lora_" not in name
        assert parameter.dtype == (torch.bfloat16 if is_half else torch.float32), name
    stock = dict(build_mlm("bert").named_parameters())
    with backbone.decoder_in_place() as whole:
        frozen = {
            name.replace(".base_layer", ""): p
            for name, p in whole.named_parameters()
            if ".lora_" not in name
        }
    assert frozen.keys() == stock.keys()
    for name, value in stock.items():
        assert torch.equal(frozen[name].float(), value.to(frozen[name].dtype).float()), name


@pytest.mark.parametrize("family", ["bert", "modernbert", "llama"])
def test_bf16_weights_are_as_near_to_fp32_as_autocast_is(family, build_mlm, tokenizer):
    def make(**others: Any) -> Backbone:
        model = build("llama", "bidirectional") if family == "llama" else build_mlm(family)
        return learn(Backbone(model, tokenizer, lora={"rank": 4, **others}))

    tokens = batch(LENGTHS)
    truth = make(dtype="fp32")(tokens)
    errors = []
    for dtype in ("fp32", "bf16"):
        with torch.autocast("cpu", torch.bfloat16):
            errors.append(far(make(dtype=dtype)(tokens), truth))
    assert errors[1] < 2 * errors[0] + 1e-3
    other = make(dtype="fp32", alpha=12)(tokens)
    assert far(other, truth) > 2 * errors[0] + 1e-3


def test_weights_that_are_stored_in_bf16_are_never_fp32(tokenizer, tmp_path, monkeypatch):
    build("llama", None).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    seen: list[set[torch.dtype]] = []
    init = EncoderBody.__init__

    def spy(body: EncoderBody, model: nn.Module, *others: Any, **options: Any) -> None:
        seen.append({parameter.dtype for parameter in model.parameters()})
        init(body, model, *others, **options)

    monkeypatch.setattr(EncoderBody, "__init__", spy)
    for lora in ({"rank": 4}, FP32, None):
        pretrained(str(tmp_path), lora=lora)
    assert seen == [{torch.bfloat16}, {torch.float32}, {torch.float32}]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_merged_copy_has_the_weights_by_hand_and_the_model_stays(dtype, tokenizer):
    model = build("llama", "bidirectional", tie_word_embeddings=True)
    learn(Backbone(model, tokenizer, lora={"rank": 4, "alpha": 6, "dtype": dtype}))
    before = copy.deepcopy(model.state_dict())
    merged = merged_copy(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(isinstance(part, LoraLayer) for part in merged.modules())
    parts = dict(model.named_modules())
    for name, value in merged.named_parameters():
        assert value.dtype == torch.float32
        part = parts[name.rpartition(".")[0]]
        expected = part.weight.double()
        if isinstance(part, LoraLayer):
            a, b = part.lora_A["default"].weight, part.lora_B["default"].weight
            assert not torch.allclose(value.double(), expected, rtol=0, atol=1e-6)
            expected = expected + 6 / 4 * b.double() @ a.double()
        assert torch.allclose(value.double(), expected, rtol=0, atol=1e-6), name
    with torch.no_grad():
        for value in merged.parameters():
            value.zero_()  # as weights that nobody else has
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_flops_count_no_gradient_of_frozen_weights(tokenizer):
    """Llama of 2 layers: q and o 32 x 32, k and v 16 x 32, three of 32 x 48; adapters of rank 4."""
    whole, adapted = (
        Backbone(build("llama", "bidirectional"), tokenizer, lora=lora) for lora in (None, FP32)
    )
    frozen = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)
    adapters = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    decoder = 32 * 60
    for training, of_frozen, of_adapters, of_decoder in (
        (False, 0, 2 * adapters, 0),
        (True, 2 * frozen, 6 * adapters, 2 * decoder / 20),
    ):
        flops = [each.flops_per_token(20, training=training) for each in (whole, adapted)]
        assert flops[1] == pytest.approx(flops[0] - of_frozen + of_adapters - of_decoder, rel=1e-12)


def test_equal_arguments_give_equal_adapters():
    texts = ["one two three", "two three four"]
    models = [tiny(texts, hidden_size=16, seed=3, lora=FP32) for _ in range(2)]
    plain = tiny(texts, hidden_size=16, seed=3)
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters()):
        assert torch.equal(one, other), name
    assert torch.equal(models[0].decoder.weight, plain.decoder.weight)
    tokens = batch((3, 2))._replace(input_ids=torch.tensor([5, 6, 7, 5, 6]))
    assert close(models[0](tokens), plain(tokens))  # B begins at zero


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (True, r"lora is True, and must be settings by their names, such as lora={'rank': 16}"),
        ({"rnk": 4}, "has rnk, and adapters have only rank, alpha, dropout"),
        ({"rank": 0}, "has rank=0, which must be a whole number from 1 on"),
        ({"rank": "lots"}, "has rank='lots', which must be a whole number"),
        ({"alpha": 0}, "has alpha=0, which must be a finite number above 0"),
        ({"dropout": 1.0}, "has dropout=1.0, which must be from 0 to below 1"),
        ({"targets": []}, "has targets=.., which must be all-linear or names"),
        ({"targets": ["query", "q_proj"]}, "target 'q_proj', and BertForMaskedLM has no linear"),
        ({"targets": "decoder"}, "target 'decoder', .* its layers end in dense, key, query, value"),
        ({"dtype": "nf4"}, r"dtype='nf4', which must be bf16 or fp32: quantised weights \(QLoRA\)"),
        ({"save": "both"}, "has save='both', which must be merged or adapter"),
    ],
)
def test_settings_that_cannot_be_are_refused(lora, message):
    with pytest.raises(ValueError, match=message):
        random_bert(60, 16, 1, 2, lora=lora)


def test_targets_are_names_or_their_ends(tokenizer):
    assert Lora.of({"targets": ("q_proj",)}).targets == ["q_proj"]
    backbone = Backbone(
        build("llama", None), tokenizer, lora=FP32 | {"targets": ["q_proj", "1.mlp.up_proj"]}
    )
    adapted = [n for n, part in backbone.named_modules() if isinstance(part, LoraLayer)]
    assert [name.partition("layers.")[2] for name in adapted] == [
        "0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj",
    ]  # fmt: skip


def test_without_peft_the_extra_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sparton\[lora\]'"):
        Backbone(build("llama", None), tokenizer, lora=FP32)
    Backbone(build("llama", None), tokenizer)


def test_frozen_weights_in_bf16_encode_in_bf16_and_not_in_fp32(build_mlm, tokenizer):
    backbone = learn(Backbone(build_mlm("bert"), tokenizer, lora={"rank": 4}))
    encoder = build_encoder(backbone, SpartonHead())
    texts = packed_tokenizer(encoder, 8, 16)
    assert usual_precision(encoder) == "bf16"
    found, expected = (
        encode_texts(encoder, texts, ["a b"], "document", precision=precision)
        for precision in (None, "bf16")
    )
    assert torch.equal(found.sparse.values, expected.sparse.values) and found.sparse.num_entries
    for refuse in (
        lambda: encode_texts(encoder, texts, ["a b"], "document", precision="fp32"),
        lambda: check_precision("fp32", encoder),
    ):
        with pytest.raises(ValueError, match="precision='fp32' has no products with the frozen"):
            refuse()
    whole = build_encoder(Backbone(build_mlm("bert"), tokenizer, lora=FP32), SpartonHead())
    assert usual_precision(whole) == "fp32"
    check_precision("fp32", whole)
