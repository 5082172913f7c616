"""Masked-language models of all architectures, whatever their attention: logits, gradients and
representations are those that transformers gives every text by itself.

Packed tokens are for the architectures whose attention allows it; the others are padded, or, where
padding would reach the text through a convolution or a Fourier transform, run length by length.
"""

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
)

from sparton.models import layouts
from sparton.models.backbone import Backbone
from sparton.models.body import without_attention_dropout
from sparton.models.folders import load_encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.layouts import choose_layout
from sparton.models.splade import SpladeEncoder
from tests.models.alone import (
    alone,
    assert_same_logits_and_gradients,
    batch,
    close,
    gradients,
    states_attending,
)
from tests.models.gte import needs_gte

ROBERTA = {"max_position_embeddings": 98, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
}
PACKED, PADDED, UNIFORM = "packed", "padded", "one length at a time"
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": (PACKED, {"embedding_size": 16}),
    "bert": (PACKED, {}),
    "camembert": (PACKED, ROBERTA),
    "data2vec-text": (PACKED, ROBERTA),
    "distilbert": (PACKED, {}),
    "electra": (PACKED, {"embedding_size": 16}),
    "ernie": (PACKED, {}),
    "gte": (PACKED, {}),
    "modernbert": (PACKED, {**TOKENS, "cls_token_id": 2, "local_attention": 8}),
    "nomic_bert": (PACKED, {}),
    "roberta": (PACKED, ROBERTA),
    "roberta-prelayernorm": (PACKED, ROBERTA),
    "xlm-roberta": (PACKED, ROBERTA),
    "xlm-roberta-xl": (PACKED, ROBERTA),
    "xmod": (PACKED, {**ROBERTA, "default_language": "en_XX"}),
    "big_bird": (PADDED, {**TOKENS, "attention_type": "block_sparse"}),
    "deberta": (PADDED, DEBERTA),
    "deberta-v2": (PADDED, DEBERTA),
    "longformer": (PADDED, {**ROBERTA, "attention_window": 8}),
    "megatron-bert": (PADDED, {}),
    "mobilebert": (PADDED, {"embedding_size": 16, "intra_bottleneck_size": 16}),
    "mpnet": (PADDED, ROBERTA),
    "rembert": (PADDED, {**TOKENS, "input_embedding_size": 16, "output_embedding_size": 24}),
    "roformer": (PADDED, {"embedding_size": 16}),
    "squeezebert": (PADDED, {"embedding_size": 32}),
    "convbert": (UNIFORM, {"embedding_size": 16}),
    "fnet": (UNIFORM, {}),
}
LENGTHS = (3, 1, 30, 2, 17, 3)


def build(architecture: str, **others: Any) -> PreTrainedModel:
    """A tiny random member, with weights large enough that attention matters."""
    sizes = {
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 96,
    }
    if architecture == "distilbert":
        sizes |= {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    options = {**sizes, **ARCHITECTURES[architecture][1], **others}
    config = without_attention_dropout(AutoConfig.for_model(architecture, **options))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        mlm = AutoModelForMaskedLM.from_config(config)
        for parameter in mlm.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
            elif parameter.std() == 0:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return mlm.eval()


@pytest.fixture(
    params=[pytest.param(x, marks=needs_gte if x == "gte" else ()) for x in ARCHITECTURES]
)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


def test_logits_and_gradients_are_those_of_texts_alone(architecture, tokenizer, caplog):
    caplog.set_level(logging.INFO, logger="sparton")
    layout = ARCHITECTURES[architecture][0]
    stock, tokens = build(architecture), batch(LENGTHS)
    backbone = Backbone(build(architecture), tokenizer).eval()
    assert backbone.layout.name == layout
    runs = f"runs on {PACKED} tokens" if layout == PACKED else f"it runs {layout}"
    assert runs in caplog.text
    assert_same_logits_and_gradients(backbone, stock, tokens)


def test_representations_behind_the_fused_head(architecture, tokenizer):
    tokens = batch((0, *LENGTHS))
    backbone = Backbone(build(architecture), tokenizer).eval()
    sparse = SpladeEncoder(backbone, SpartonHead())(tokens)
    texts = alone(build(architecture), batch(LENGTHS)).split(LENGTHS)
    expected = torch.stack([logits.amax(0).relu().log1p() for logits in texts])
    assert not sparse[0].any()
    assert close(sparse[1:], expected)
    assert not close(sparse[:-1], expected)
    found = gradients(backbone.model, sparse)
    assert found and all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("architecture", ["mpnet", "convbert"], indirect=True)
def test_tokens_that_are_not_attended_to(architecture, tokenizer):
    """Padded: as transformers' attention mask leaves them out."""
    tokens = batch((4, 9))
    keys, expected = states_attending(build(architecture), tokens, (2, 3))
    backbone = Backbone(build(architecture), tokenizer).eval()
    assert close(backbone.hidden_states(tokens._replace(keys=keys)), expected)
    assert not close(backbone.hidden_states(tokens), expected)


@pytest.mark.parametrize("architecture", ["deberta-v2", "convbert"], indirect=True)
def test_recomputed_layers_change_nothing(architecture, tokenizer):
    tokens, found = batch(LENGTHS), []
    for checkpointing in (False, True):
        mlm = build(architecture)
        backbone = Backbone(mlm, tokenizer, gradient_checkpointing=checkpointing).train()
        torch.manual_seed(0)
        found.append(gradients(mlm, backbone(tokens)))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("mobilebert", {}), ("deberta-v2", {"legacy": False}), ("mpnet", {})],
)
def test_folders_of_heads_with_forms_of_their_own(architecture, options, tokenizer, tmp_path):
    stock, tokens = build(architecture, **options), batch(LENGTHS)
    backbone = Backbone(build(architecture, **options), tokenizer).eval()
    expected = alone(stock, tokens)
    assert close(backbone.decoder(backbone(tokens)), expected)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.mul_(1.1)
    moved = backbone.decoder(backbone(tokens))
    assert not close(moved, expected)
    with backbone.decoder_in_place() as mlm:
        mlm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again: Callable = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert close(alone(again, tokens), moved)
    encoder = load_encoder(tmp_path, EagerHead()).eval()
    assert close(encoder.backbone.decoder(encoder.backbone(tokens)), moved)


@pytest.mark.parametrize(("architecture", "options"), [("mobilebert", {}), ("deberta-v2", {})])
def test_vocabularies_grow_where_the_head_allows_it(architecture, options, tokenizer):
    backbone = Backbone(build(architecture, **options), tokenizer).eval()
    if architecture == "mobilebert":
        with pytest.raises(ValueError, match=r"MobileBertForMaskedLM cannot grow.* 60 tokens"):
            backbone.add_tokens(["[Q] "])
        return
    before = backbone.decoder(backbone(batch(LENGTHS)))
    backbone.add_tokens(["[Q] "])
    torch.testing.assert_close(backbone.decoder(backbone(batch(LENGTHS)))[:, :60], before)


def test_an_encoder_with_a_decoder_is_refused(tokenizer):
    config = BartConfig(vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1)
    with pytest.raises(ValueError, match="BartForConditionalGeneration is an encoder with a dec"):
        choose_layout(BartForConditionalGeneration(config), 60, 96)


def test_a_body_that_draws_random_numbers_is_refused():
    model = build("bert")
    model.bert.embeddings.register_forward_hook(lambda _, __, out: out + torch.randn_like(out))
    with pytest.raises(ValueError, match="other states among others than alone"):
        choose_layout(model, 60, 96)


@pytest.mark.parametrize("architecture", ["bert", "deberta", "modernbert", "albert", "convbert"])
def test_weights_of_16_bits_are_tried_in_fp32(architecture, monkeypatch):
    model = build(architecture).eval().bfloat16()
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():  # as they are, they round
        states = model.base_model(input_ids=tokens).last_hidden_state
        exact = deepcopy(model).float().base_model(input_ids=tokens).last_hidden_state
    assert states.dtype == torch.bfloat16 and (states - exact).norm() > 1e-3 * exact.norm()
    given = [(weight.data_ptr(), weight.dtype) for weight in model.parameters()]
    differences = []

    def are_close(states: Tensor, expected: Tensor) -> bool:
        differences.append(float((states - expected).norm() / expected.norm()))
        return close(states, expected)

    close = layouts._are_close
    monkeypatch.setattr(layouts, "_are_close", are_close)
    assert choose_layout(model, 60, 96).name == ARCHITECTURES[architecture][0]
    assert differences[-1] < 1e-5
    assert given == [(weight.data_ptr(), weight.dtype) for weight in model.parameters()]


@pytest.mark.gpu
def test_every_layout_on_a_gpu(architecture, tokenizer):
    tokens = batch(LENGTHS)
    expected = alone(build(architecture), tokens).detach()
    backbone = Backbone(build(architecture).cuda(), tokenizer).eval()
    assert backbone.layout.name == ARCHITECTURES[architecture][0]
    logits = backbone.decoder(backbone(tokens.to("cuda")))
    logits.sum().backward()
    error = (logits.cpu() - expected).norm() / expected.norm()
    assert error < 1e-3 < (expected.roll(1, 0) - expected).norm() / expected.norm()
