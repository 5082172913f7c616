"""Packed and padded forwards agree, for every family that can be packed.

The other side of each comparison is the stock Hugging Face model with its own sdpa attention,
padding and attention mask.
"""

import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, BertForMaskedLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sparton import packing
from sparton.models.backbone import Backbone
from sparton.models.body import without_attention_dropout
from sparton.types import TokenBatch
from tests.models.alone import assert_same_gradients, batch, close, gradients, num_parameters


def padded_logits(mlm, tokens: TokenBatch) -> Tensor:
    mlm.set_attn_implementation("sdpa")
    logits = mlm(
        input_ids=tokens.pad(tokens.input_ids, fill=mlm.config.pad_token_id),
        attention_mask=tokens.padding_mask().long(),
    ).logits
    return packing.unpad(logits, tokens.cu_seqlens, tokens.num_tokens)


def packed_logits(backbone: Backbone, tokens: TokenBatch) -> Tensor:
    return backbone.decoder(backbone(tokens))


def test_packed_logits_equal_padded(family, build_mlm, tokenizer):
    tokens = batch()
    expected = padded_logits(build_mlm(family), tokens)
    backbone = Backbone(build_mlm(family), tokenizer).eval()
    assert backbone(tokens).shape == (tokens.num_tokens, 32)
    assert close(packed_logits(backbone, tokens), expected)

    merged = tokens.cu_seqlens.clone()
    merged[4] = merged[5]
    wrong = tokens._replace(cu_seqlens=merged, max_seqlen=32)
    assert not close(packed_logits(backbone, wrong), expected)


def test_positions_that_do_not_restart_are_noticed(family, build_mlm, tokenizer):
    if family in ("modernbert", "gte"):
        pytest.skip("rotary positions are relative")
    tokens = batch()
    expected = padded_logits(build_mlm(family), tokens)
    wrong = tokens._replace(position_ids=torch.arange(tokens.num_tokens))
    backbone = Backbone(build_mlm(family), tokenizer).eval()
    assert not close(packed_logits(backbone, wrong), expected)


def test_the_local_window_is_that_of_transformers(build_mlm, tokenizer):
    tokens = batch()
    expected = padded_logits(build_mlm("modernbert"), tokens)
    backbone = Backbone(build_mlm("modernbert"), tokenizer).eval()
    local = [m for m in backbone.modules() if getattr(m, "sliding_window", None) is not None]
    assert len(local) == 2
    for off in (-1, 1):
        for layer in local:
            layer.sliding_window += off
        assert not close(packed_logits(backbone, tokens), expected)
        for layer in local:
            layer.sliding_window -= off
    assert close(packed_logits(backbone, tokens), expected)


def test_packed_gradients_equal_padded(family, build_mlm, tokenizer):
    tokens = batch()
    stock = build_mlm(family)
    expected = gradients(stock, padded_logits(stock, tokens))
    backbone = Backbone(build_mlm(family), tokenizer).eval()
    logits = packed_logits(backbone, tokens)
    with backbone.decoder_in_place() as mlm:
        actual = gradients(mlm, logits)
    assert_same_gradients(actual, expected)


def test_sequences_do_not_see_each_other(family, build_mlm, tokenizer):
    backbone = Backbone(build_mlm(family), tokenizer).eval()
    tokens = batch()
    before = backbone(tokens)
    changed = tokens.input_ids.clone()
    changed[4:34] = 7  # the sequence of 30
    after = backbone(tokens._replace(input_ids=changed))
    others = torch.ones(tokens.num_tokens, dtype=torch.bool)
    others[4:34] = False
    torch.testing.assert_close(after[others], before[others], rtol=0, atol=1e-6)
    assert not torch.allclose(after[~others], before[~others], atol=1e-2)


def test_a_batch_without_tokens(family, build_mlm, tokenizer):
    backbone = Backbone(build_mlm(family), tokenizer)
    assert backbone(TokenBatch.from_lists([])).shape == (0, 32)
    assert backbone(TokenBatch.from_lists([[], []])).shape == (0, 32)


def test_empty_sequences_give_finite_gradients(family, build_mlm, tokenizer):
    backbone = Backbone(build_mlm(family), tokenizer)
    packed_logits(backbone, batch((0, 9, 0, 2))).sum().backward()
    assert all(p.grad.isfinite().all() for p in backbone.parameters() if p.grad is not None)


def test_too_long_a_sequence_is_refused(family, build_mlm, tokenizer):
    backbone = Backbone(build_mlm(family), tokenizer)
    assert backbone.max_length == 96
    assert backbone(batch((96,))).shape == (96, 32)
    with pytest.raises(ValueError, match=r"97 tokens.*96 positions"):
        backbone(batch((97,)))


def test_the_decoder_leaves_and_returns(family, build_mlm, tokenizer):
    mlm = build_mlm(family)
    names = set(mlm.state_dict())
    total = sum(p.numel() for p in mlm.parameters())
    backbone = Backbone(mlm, tokenizer)
    assert backbone.decoder.weight is mlm.get_input_embeddings().weight
    assert num_parameters(backbone) == total
    with backbone.decoder_in_place() as whole:
        assert set(whole.state_dict()) == names
    assert mlm.get_output_embeddings() is not backbone.decoder
    backbone.to(torch.bfloat16)
    assert backbone.decoder.weight is mlm.get_input_embeddings().weight


def test_gradient_checkpointing_recomputes_and_changes_no_gradient(family, build_mlm, tokenizer):
    tokens = batch()
    results, runs = [], []
    for option in (False, True):
        backbone = Backbone(build_mlm(family), tokenizer, gradient_checkpointing=option).train()
        for module in backbone.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        body = backbone.model.base_model
        layer = next(m for m in body.modules() if isinstance(m, GradientCheckpointingLayer))
        linear = [m for m in layer.modules() if isinstance(m, nn.Linear)][-2]  # of the middle
        # Layers of ours call what owns a product, and not the product.
        owner = next(m for m in layer.modules() if linear in m.children())
        counted = linear if owner is layer else owner
        calls: list[nn.Module] = []
        # Before, since a recomputation ends where nothing more is asked of it.
        counted.register_forward_pre_hook(lambda module, _, calls=calls: calls.append(module))
        results.append(gradients(backbone, packed_logits(backbone, tokens)))
        runs.append(len(calls))
    assert runs == [1, 2]
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient)


@pytest.mark.gpu
def test_half_precision_on_a_gpu_is_as_exact_packed_as_padded(family, build_mlm, tokenizer):
    tokens = batch((3, 1, 90, 30, 2, 17)).to("cuda")
    truth = padded_logits(build_mlm(family).double().cuda(), tokens)
    backbone = Backbone(build_mlm(family), tokenizer).eval().cuda()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        padded = padded_logits(build_mlm(family).cuda(), tokens)
        packed = packed_logits(backbone, tokens)
        merged = tokens.cu_seqlens.clone()
        merged[4] = merged[5]
        wrong = packed_logits(backbone, tokens._replace(cu_seqlens=merged))
    errors = [float((logits - truth).abs().mean()) for logits in (packed, padded, wrong)]
    assert errors[0] < 1.25 * errors[1] < errors[2]


@pytest.mark.gpu
def test_compiled_on_a_gpu_without_recompilation(family, build_mlm, tokenizer):
    eager = Backbone(build_mlm(family), tokenizer).eval().cuda()
    compiled = Backbone(build_mlm(family), tokenizer, compile=True).eval().cuda()
    torch._dynamo.reset()
    for lengths in ((3, 5, 7), (10, 20), (1, 1, 1, 9), (2, 4, 5, 90, 12), (64,) * 40):
        # The first batch compiles a graph for each kind of layer; ModernBERT has two.
        steady = torch._dynamo.config.patch(error_on_recompile=lengths != (3, 5, 7))
        with steady, torch.autocast("cuda", torch.bfloat16):
            tokens = batch(lengths).to("cuda")
            actual, expected = packed_logits(compiled, tokens), packed_logits(eager, tokens)
            scale = float(expected.detach().abs().max())
            assert float((actual - expected).detach().abs().max()) < 0.05 * scale
            actual.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in compiled.parameters() if p.grad is not None)


def test_attention_dropout_is_refused(build_mlm, tokenizer):
    mlm = build_mlm("bert")
    mlm.config.attention_probs_dropout_prob = 0.1
    with pytest.raises(ValueError, match=r"attention_probs_dropout_prob is 0\.1"):
        Backbone(mlm, tokenizer)


def test_attention_dropout_is_off_whatever_it_is_called():
    """In some configurations, as GPT-2's, it is on unless told otherwise."""
    found = set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(kind)
        except StrictDataclassError:  # one that says nothing is none
            continue
        names = [key for key in config.to_dict() if re.search("^att.*drop", key)]
        for name in names:
            setattr(config, name, 0.5)
        without_attention_dropout(config)
        assert {name: getattr(config, name) for name in names} == dict.fromkeys(names, 0.0), kind
        found |= {*names}
    assert found >= {"attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"}


class _Unmoved(BertForMaskedLM):
    """A model that keeps the attention it was built with."""

    def set_attn_implementation(self, *_: object, **__: object) -> None: ...


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_that_would_mix_sequences_is_padded_in_every_precision(
    family, build_mlm, tokenizer, dtype
):
    assert Backbone(build_mlm(family).to(dtype), tokenizer).layout.packed
    mlm = build_mlm("bert").to(dtype)
    unmoved = _Unmoved(mlm.config).to(dtype)
    unmoved.load_state_dict(mlm.state_dict())
    assert not Backbone(unmoved, tokenizer).layout.packed


def test_a_tokenizer_larger_than_the_model_is_refused(build_mlm, tokenizer):
    tokenizer.add_tokens(["extra"])
    with pytest.raises(ValueError, match=r"61 tokens.*60 vocabulary rows"):
        Backbone(build_mlm("bert"), tokenizer)


def test_flops_per_token_counts_every_matrix_product(family, build_mlm, tokenizer):
    backbone = Backbone(build_mlm(family), tokenizer)
    inner = 2 * 32 * 48 + 4 * 32 * 32  # feed-forward and attention projections of a layer
    head = 32 * 32
    layers, spans = 2, 2 * 20
    if family in ("modernbert", "gte"):
        inner += 32 * 48  # its feed-forward is gated
    if family == "modernbert":
        layers, spans = 4, 2 * 20 + 2 * 9
    forward = 2 * (layers * inner + head) + 4 * 32 * spans
    decoder = 2 * 32 * 60
    assert backbone.flops_per_token(20, training=False) == forward + decoder
    expected = 3 * forward + decoder + 2 * decoder / 20
    assert backbone.flops_per_token(20) == pytest.approx(expected)
