"""The encoder: representations, gradients of a tied decoder, and the properties others rely on."""

import pytest
import torch

from sparton.models.backbone import Backbone
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.types import TokenBatch

TOKENS = TokenBatch.from_lists([[5, 6, 7], [], [8, 9, 10, 11], [12]])


def encoder(build_mlm, tokenizer, family="bert") -> SpladeEncoder:
    return SpladeEncoder(Backbone(build_mlm(family), tokenizer), EagerHead()).eval()


def test_representations_are_the_maximum_over_each_sequence(family, build_mlm, tokenizer):
    model = encoder(build_mlm, tokenizer, family)
    logits = model.backbone.decoder(model.backbone(TOKENS))
    rows = [logits[:3].amax(0), torch.zeros(60), logits[3:7].amax(0), logits[7]]
    expected = torch.log1p(torch.relu(torch.stack(rows)))
    actual = model(TOKENS)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(actual, expected.roll(1, 0))


@pytest.mark.parametrize("head", [EagerHead(), SpartonHead("sum", "log1p_relu")])
def test_topk_is_of_the_same_representations(head, build_mlm, tokenizer):
    model = encoder(build_mlm, tokenizer)
    model.head = head
    values, indices = model.topk(TOKENS, "query", 5)
    torch.testing.assert_close(values, model(TOKENS).topk(5).values)
    torch.testing.assert_close(values, model(TOKENS).gather(1, indices))
    assert values[0].any()
    assert not values.requires_grad


def test_half_precision_still_gives_fp32(build_mlm, tokenizer):
    assert encoder(build_mlm, tokenizer).bfloat16()(TOKENS).dtype == torch.float32


def test_properties(build_mlm, tokenizer):
    model = encoder(build_mlm, tokenizer)
    assert model.vocabulary_size == 60
    assert model.tokenizer is tokenizer
    assert model.device == torch.device("cpu")
    assert model.to("meta").device == torch.device("meta")


def test_a_tied_decoder_is_one_parameter_with_both_gradients(build_mlm, tokenizer):
    model = encoder(build_mlm, tokenizer)
    weight = model.backbone.decoder.weight
    assert sum(parameter is weight for parameter in model.parameters()) == 1
    model(TOKENS).sum().backward()
    both = weight.grad.clone()

    model.zero_grad()
    hidden = model.backbone(TOKENS).detach()
    model.head(hidden, weight, model.backbone.decoder.bias, TOKENS).sum().backward()
    decoder_only = weight.grad
    assert not torch.allclose(both[5:13], decoder_only[5:13])
    torch.testing.assert_close(both[20:], decoder_only[20:])  # tokens that were not read
