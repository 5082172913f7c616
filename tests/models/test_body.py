"""The body of an encoder and the masked-LM head, apart and together; tokens that only look on.

The other side of each comparison is the stock Hugging Face model with its own sdpa attention,
padding and attention mask.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, BertModel, PreTrainedModel

from sparton import packing
from sparton.models.backbone import Backbone
from sparton.models.body import EncoderBody
from sparton.models.heads import SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.models.words import word_tokenizer
from sparton.types import TokenBatch, TokenRows
from tests.models.alone import (
    TOLERANCE,
    assert_same_gradients,
    batch,
    close,
    gradients,
    num_parameters,
)

# Embeddings, masked-LM head and one for all layers; ModernBERT's also has layers with a window, a
# first layer without a norm, and a norm at the end.
GRAPHS = {"bert": 3, "distilbert": 3, "xlm_roberta": 3, "modernbert": 5, "gte": 3}


def with_onlookers(own=(3, 1, 12, 6), length=12) -> TokenBatch:
    """Queries that [MASK] (4) fills up to ``length`` without being attended to."""
    tokens = batch(own)
    sequences = [*tokens.input_ids.split(own)]
    filled = [[*ids.tolist(), *[4] * (length - len(ids))] for ids in sequences]
    rows = [n * length + s for n, count in enumerate(own) for s in range(count)]
    keys = TokenRows(torch.tensor(rows), tokens.cu_seqlens, max(own))
    return TokenBatch.from_lists(filled)._replace(keys=keys)


def stock_states(model: PreTrainedModel, tokens: TokenBatch) -> Tensor:
    """Last states of the stock body on the padded view, [T, D]."""
    model.set_attn_implementation("sdpa")
    seen = torch.ones(tokens.num_tokens, dtype=torch.int64)
    if tokens.keys is not None:
        seen = torch.zeros_like(seen).index_fill(0, tokens.keys.rows, 1)
    states = model.base_model(
        input_ids=tokens.pad(tokens.input_ids, fill=model.config.pad_token_id),
        attention_mask=tokens.pad(seen),
    ).last_hidden_state
    return packing.unpad(states, tokens.cu_seqlens, tokens.num_tokens)


def test_hidden_states_are_those_of_the_stock_body(family, build_mlm, tokenizer):
    tokens, stock = batch(), build_mlm(family)
    expected = stock_states(stock, tokens)
    body = EncoderBody(build_mlm(family).base_model, tokenizer).eval()
    states = body.hidden_states(tokens)
    assert close(states, expected)
    assert not close(body.hidden_states(batch(seed=1)), expected)
    assert_same_gradients(gradients(body.model, states), gradients(stock.base_model, expected))
    whole = Backbone(build_mlm(family), tokenizer).eval()
    assert torch.equal(whole.hidden_states(tokens), states)


def test_the_head_reads_hidden_states_as_the_whole_model_does(family, build_mlm, tokenizer):
    tokens = batch()
    backbone = Backbone(build_mlm(family), tokenizer).eval()
    whole, hidden = backbone(tokens), backbone.hidden_states(tokens)
    parts = backbone.transform(hidden)
    assert torch.equal(parts, whole)
    assert not close(hidden, whole)
    assert_same_gradients(gradients(backbone, parts), gradients(backbone, whole))


def test_the_head_is_not_registered_twice_and_follows_its_parameters(family, build_mlm, tokenizer):
    mlm = build_mlm(family)
    names = {f"model.{name}" for name in mlm.state_dict() if "decoder" not in name}
    backbone = Backbone(mlm, tokenizer).eval()
    kept = {n for n in backbone.state_dict() if "decoder" not in n and "projector" not in n}
    assert kept == {name for name in names if "projector" not in name}
    tokens = batch()
    with backbone.decoder_in_place():
        pass
    for other in (backbone.to(torch.bfloat16), copy.deepcopy(backbone).float()):
        assert torch.equal(other.transform(other.hidden_states(tokens)), other(tokens))
    before = backbone(tokens)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(backbone(tokens), before)


def test_a_batch_without_tokens(family, build_mlm, tokenizer):
    backbone = Backbone(build_mlm(family), tokenizer)
    hidden = backbone.hidden_states(TokenBatch.from_lists([[], []]))
    assert hidden.shape == backbone.transform(hidden).shape == (0, 32)


@pytest.mark.quick(1)
def test_layers_share_one_graph_for_all_lengths(family, build_mlm, tokenizer, graphs):
    eager = Backbone(build_mlm(family), tokenizer).eval()
    backbone = Backbone(build_mlm(family), tokenizer, compile=True).eval()
    backbone.bare()  # checks a body that is compiled, without compiling anything
    assert graphs.frame_count == 0
    for lengths in ((3, 5, 7), (10, 20), (1, 1, 1, 9), (2, 0, 4, 5, 30, 12)):
        tokens = batch(lengths)
        torch.testing.assert_close(backbone(tokens), eager(tokens))
    assert graphs.frame_count == GRAPHS[family]


@pytest.mark.slow
def test_training_and_evaluation_compile_once_each(build_mlm, tokenizer, graphs):
    backbone = Backbone(build_mlm("bert"), tokenizer, compile=True, half_residual=True)
    found = []
    for training, grad in ((True, True), (True, False), (False, False)):
        backbone.train(training)
        for lengths in ((3, 5), (4, 9, 2)):
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
                backbone(batch(lengths))
        found.append(graphs.frame_count)
    # The masked-LM head has no dropout, hence one graph without gradients.
    assert found == [3, 6, 8]


def test_both_sides_in_one_pass(family, build_mlm, tokenizer):
    backbone = Backbone(build_mlm(family), tokenizer).eval()
    sides = batch((3, 1, 9)), batch((0, 30, 2, 17), seed=1)
    together = backbone(TokenBatch.concatenate(sides))
    apart = torch.cat([backbone(side) for side in sides])
    torch.testing.assert_close(together, apart, rtol=0, atol=TOLERANCE)
    sides = batch(), with_onlookers()
    together = backbone(TokenBatch.concatenate(sides))
    apart = torch.cat([backbone(side) for side in sides])
    torch.testing.assert_close(together, apart, rtol=0, atol=TOLERANCE)
    seen = backbone(TokenBatch.concatenate(sides)._replace(keys=None))
    assert not torch.allclose(seen, apart, atol=10 * TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_both_sides_in_one_pass_on_a_gpu(compiled, build_mlm, tokenizer):
    backbone = Backbone(build_mlm("bert"), tokenizer, compile=compiled, half_residual=True)
    encoder = SpladeEncoder(backbone, SpartonHead()).eval().cuda()
    sides = batch((3, 1, 9)).to("cuda"), batch((30, 2, 17), seed=1).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        together = encoder.encode_both(*sides)
        apart = [encoder.encode(side, "query") for side in sides]
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one.sparse, other.sparse, rtol=0.05, atol=0.05)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            together[0].sparse, apart[0].sparse.roll(1, 0), rtol=0.05, atol=0.05
        )
    sum(reps.sparse.sum() for reps in together).backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)


def test_a_bare_body_leaves_the_head_behind(family, build_mlm, tokenizer):
    backbone = Backbone(build_mlm(family), tokenizer).eval()
    body = backbone.bare()
    assert body.model is backbone.model.base_model
    assert body.bare() is body
    assert torch.equal(body.hidden_states(batch()), backbone.hidden_states(batch()))
    head = 32 * 32 + 2 * 32 + (32 if family != "modernbert" else -32)  # dense and norm, biases
    bias = 0 if backbone.decoder.bias is None else 60
    assert num_parameters(backbone) - num_parameters(body) == head + bias
    assert backbone.flops_per_token(20) - body.flops_per_token(20) == pytest.approx(
        6 * 32 * 32 + 2 * 32 * 60 * (1 + 2 / 20)
    )


def test_a_body_needs_no_head(build_mlm, tokenizer):
    model = BertModel(build_mlm("bert").config)
    body = EncoderBody(model, tokenizer, gradient_checkpointing=True)
    assert body.hidden_size == 32 and body.max_length == 96
    with pytest.raises(ValueError, match="BertModel has no linear decoder; use a masked-LM"):
        Backbone(model, tokenizer)


def test_onlookers_are_as_in_the_stock_body(family, build_mlm, tokenizer):
    """Attended to by nobody, they see the text; in ModernBERT some lie beyond its window."""
    tokens, stock = with_onlookers(), build_mlm(family)
    expected = stock_states(stock, tokens)
    backbone = Backbone(build_mlm(family), tokenizer).eval()
    states = backbone.hidden_states(tokens)
    assert close(states, expected)
    assert not close(backbone.hidden_states(tokens._replace(keys=None)), expected)
    actual = gradients(backbone.model.base_model, states)
    assert_same_gradients(actual, gradients(stock.base_model, expected))


def test_own_tokens_do_not_depend_on_onlookers(family, build_mlm, tokenizer):
    tokens, body = with_onlookers(), EncoderBody(build_mlm(family).base_model, tokenizer).eval()
    alone = body.hidden_states(batch((3, 1, 12, 6)))
    among = body.hidden_states(tokens)
    assert close(among.index_select(0, tokens.keys.rows), alone)
    changed = tokens.input_ids.clone()
    changed[3:12] = 9
    other = body.hidden_states(tokens._replace(input_ids=changed))
    assert close(other[:3], among[:3])
    assert not close(other[3:12], among[3:12])


def test_sequences_of_onlookers_alone_stay_finite(family, build_mlm, tokenizer):
    tokens = with_onlookers((0, 2), 20)
    body = EncoderBody(build_mlm(family).base_model, tokenizer)
    states = body.hidden_states(tokens)
    assert states.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(body, states).values())


def test_new_tokens_have_rows_of_their_own(family, build_mlm, tmp_path):
    tokenizer = word_tokenizer([f"w{row}" for row in range(5, 60)], 96)
    backbone = Backbone(build_mlm(family), tokenizer).eval()
    tokens = batch()
    before, logits = backbone(tokens), backbone.decoder(backbone(tokens))
    backbone.add_tokens(["[Q] ", "[D] "])
    backbone.add_tokens(["[Q] "])
    assert len(tokenizer) == 62
    assert tokenizer.tokenize("[Q] w7 [q] ")[:2] == ["[Q] ", "w7"]
    weight = backbone.decoder.weight.detach()
    assert backbone.decoder.weight is backbone.model.get_input_embeddings().weight
    assert weight.shape == (62, 32) and backbone.decoder.out_features == 62
    assert torch.equal(backbone(tokens), before)
    torch.testing.assert_close(backbone.decoder(backbone(tokens))[:, :60], logits)
    spread = weight[60:].std() / weight[:60].std()
    assert 0.5 < float(spread) < 2 and not torch.equal(weight[60], weight[61])
    with backbone.decoder_in_place() as mlm:
        mlm.save_pretrained(tmp_path)
    again: Callable = AutoModelForMaskedLM.from_pretrained(tmp_path).get_output_embeddings()
    assert torch.equal(again.weight, weight)
    if backbone.decoder.bias is not None:
        assert torch.equal(again.bias, backbone.decoder.bias)
        torch.testing.assert_close(again.bias[60], again.bias[:60].mean())


def test_spare_rows_are_used_before_new_ones_are_made(build_mlm):
    tokenizer = word_tokenizer([f"w{row}" for row in range(5, 59)], 96)
    backbone = Backbone(build_mlm("bert"), tokenizer)
    weight = backbone.decoder.weight.clone()
    backbone.add_tokens(["[Q] "])
    assert torch.equal(backbone.decoder.weight, weight)
