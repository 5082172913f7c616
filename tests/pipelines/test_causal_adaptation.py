"""Adaptation of causal language models: what is predicted from where, the losses, the folder."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from sparton.models.backbone import Backbone
from sparton.models.backbones import pretrained, tiny
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder
from sparton.models.words import word_tokenizer
from sparton.pipelines import adapt_lm, language_loss
from sparton.pipelines.masked_language import Masking, Plan, mask_token
from sparton.types import TokenBatch
from tests.models.alone import batch, close
from tests.models.causal_lms import WORDS, build

PLAN = Plan("mntp", steps=6, batch_tokens=128, length=20, lr=3e-3, active_terms=9)
# A text goes on as it began: any of its words tells the others.
TEXTS = [" ".join(f"w{5 + (row + 7 * step) % 50}" for step in range(8)) for row in range(400)]


@pytest.fixture
def start(tmp_path) -> Path:
    build("llama", None, tie_word_embeddings=True).save_pretrained(tmp_path / "start")
    word_tokenizer(WORDS, 96).save_pretrained(tmp_path / "start")
    return tmp_path / "start"


def predicted(objective: str) -> tuple[TokenBatch, Tensor, Tensor, Tensor]:
    tokens = TokenBatch.from_lists([list(range(5, 55))] * 200 + [[], [7]])
    masked = Masking(objective, word_tokenizer(WORDS, 96))(tokens, torch.Generator())
    return tokens, masked.tokens.input_ids, masked.places, masked.targets


def test_every_token_but_the_first_is_predicted_from_the_one_before():
    tokens, shown, places, targets = predicted("clm")
    assert torch.equal(shown, tokens.input_ids)
    expected = (tokens.position_ids > 0).nonzero().squeeze(1)
    assert torch.equal(places, expected - 1)
    assert torch.equal(targets, tokens.input_ids[expected])
    assert torch.equal(targets, tokens.input_ids[places] + 1)


def test_a_fifth_is_hidden_and_predicted_from_the_token_before():
    tokens, shown, places, targets = predicted("mntp")
    assert len(targets) / 10_000 == pytest.approx(0.2 * 49 / 50, abs=0.01)
    assert torch.equal(tokens.input_ids[places + 1], targets)
    assert (shown[places + 1] == 4).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (tokens.position_ids[places + 1] > 0).all()
    untouched = torch.ones_like(shown, dtype=torch.bool).index_fill(0, places + 1, False)
    assert torch.equal(shown[untouched], tokens.input_ids[untouched])


def test_an_underscore_hides_tokens_where_there_is_no_mask():
    tokenizer = word_tokenizer([*WORDS, "_"], 96)
    assert mask_token(tokenizer) == 4
    tokenizer.mask_token = None
    assert mask_token(tokenizer) == 60
    other = word_tokenizer(WORDS, 96)
    other.mask_token = None
    with pytest.raises(ValueError, match="has neither a mask token nor the token '_'"):
        mask_token(other)


@pytest.mark.parametrize("relu_weight", [0.0, 0.5])
def test_the_loss_and_its_gradient_in_parts(relu_weight, monkeypatch):
    """Equation 3 of CSPLADE, in float64 and at once."""
    torch.manual_seed(0)
    decoder, states = nn.Linear(8, 30), torch.randn(17, 8, requires_grad=True)
    targets = torch.randint(30, (17,))
    copy, wide = states.detach().double().requires_grad_(), nn.Linear(8, 30).double()
    wide.load_state_dict(decoder.state_dict())
    logits = wide(copy)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    expected = expected + relu_weight * F.cross_entropy(
        logits.clamp(min=0).add(1).log(), targets, reduction="sum"
    )
    expected.backward()
    monkeypatch.setattr(language_loss, "LOGITS_AT_ONCE", 4 * 30)
    found = language_loss.language_loss(decoder, states, targets, relu_weight)
    found.backward()
    torch.testing.assert_close(found, expected.float())
    torch.testing.assert_close(states.grad.double(), copy.grad)
    torch.testing.assert_close(decoder.weight.grad.double(), wide.weight.grad)
    assert not torch.allclose(states.grad[:4].double(), copy.grad[4:8])
    loss, right = language_loss.predict(decoder, states, targets)
    assert right == (logits.argmax(1) == targets).sum()
    assert close(loss.double(), F.cross_entropy(logits, targets, reduction="sum"))


@pytest.mark.parametrize(("objective", "causal"), [("mntp", False), ("clm", True)])
def test_a_causal_model_learns_and_is_a_backbone_again(objective, causal, start, tmp_path):
    plan = replace(PLAN, objective=objective, steps=60, relu_weight=float(causal))
    output = tmp_path / "adapted"
    adapted = adapt_lm(TEXTS, output, backbone=start, plan=plan, progress=False)
    assert adapted.after.loss < 0.7 * adapted.before.loss
    assert adapted.after.accuracy > adapted.before.accuracy + 0.1
    backbone = pretrained(str(output), center=True).eval()
    assert backbone.is_causal == causal
    again = pretrained(str(output)).eval()
    tokens = batch((9, 4))
    assert close(backbone.decoder(backbone(tokens)), again.decoder(again(tokens)))
    assert backbone.tokenizer("w7 w9")["input_ids"] == [7, 9]
    # Those that were held out are of the same kind as all: 9 active terms each, on average.
    texts = TokenBatch.from_lists(backbone.tokenizer(TEXTS)["input_ids"])
    active = (load_encoder(output).eval()(texts) > 0).sum(1).float().mean()
    assert 6 < active < 13
    # The language model is what it was but for the mean row: stock transformers predicts the same.
    stock = AutoModelForCausalLM.from_pretrained(output).eval()
    ids = torch.tensor([[7, 14, 21]])
    probabilities = (stock(input_ids=ids).logits[0] + again.decoder.bias).softmax(-1)
    with torch.no_grad():
        own = again.decoder(again(TokenBatch.from_lists(ids.tolist()))).softmax(-1)
    assert close(own, probabilities)


def test_a_stopped_adaptation_goes_on(start, tmp_path, monkeypatch):
    settings = {"backbone": start, "plan": PLAN, "checkpoint_every": 2, "progress": False}
    whole = adapt_lm(TEXTS, tmp_path / "whole", **settings)
    with monkeypatch.context() as patched:
        patched.setattr("sparton.pipelines.adaptation.save_encoder", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            adapt_lm(TEXTS, tmp_path / "stopped", **settings)
    again = adapt_lm(TEXTS, tmp_path / "stopped", **settings)
    assert again.after == whole.after and again.shift == whole.shift


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_objectives_and_models_that_do_not_fit_are_refused(start, tmp_path):
    masked = SpladeEncoder(tiny(TEXTS, hidden_size=16, layers=1, max_length=32), EagerHead())
    save_encoder(masked, tmp_path / "masked", query_length=32, document_length=32)
    for objective, backbone, message in (
        ("mlm", start, "objective='mlm' is for masked language models, and Llama.*: choose mntp"),
        ("mntp", tmp_path / "masked", "objective='mntp' is for causal language models, and Bert"),
        ("clm", tmp_path / "masked", "is for causal language models"),
        ("clm", Backbone(build("llama", "bidirectional"), word_tokenizer(WORDS, 96)),
         "objective='clm' needs attention that is causal: load"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            adapt_lm(TEXTS, tmp_path / "x", backbone=backbone, plan=Plan(objective))
    assert not (tmp_path / "x.run").exists()
