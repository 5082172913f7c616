"""Where the logits of language models begin, and that a saved model begins there again.

The other side of each comparison is what transformers makes of every text by itself, changed in
float64.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparton.models.backbone import Backbone
from sparton.models.backbones import pretrained
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.logits import start_logits
from sparton.models.splade import SpladeEncoder
from sparton.models.words import word_tokenizer
from tests.models.alone import alone, batch, close, num_parameters
from tests.models.causal_lms import ARCHITECTURES, TEXTS, WORDS, build, encode, tokenizer_of

LENGTHS = (3, 1, 30, 2, 17)


def started(model: PreTrainedModel, **start: float) -> Backbone:
    backbone = Backbone(model, tokenizer_of(model)).eval()
    start_logits(backbone, **start)
    return backbone


def save(backbone: Backbone, path: Path) -> None:
    encoder = SpladeEncoder(backbone, SpartonHead())
    save_encoder(encoder, path, query_length=8, document_length=8)


def logits(backbone: Backbone) -> Tensor:
    return backbone.decoder(backbone(batch(LENGTHS)))


def centered(model: PreTrainedModel) -> Tensor:
    """Logits of a stock model whose decoder has rows of mean zero, in float64."""
    states = []
    decoder = model.get_output_embeddings()
    hook = decoder.register_forward_hook(lambda _, inputs, __: states.append(inputs[0][0]))
    given = alone(model, batch(LENGTHS))
    hook.remove()
    weight = decoder.weight.double()
    shared = torch.cat(states).double() @ weight.mean(0)
    scaling = getattr(model.config, "logits_scaling", 1.0)
    return given.double() - shared[:, None] / scaling


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_centered_models_are_stock_models(architecture, tied, tmp_path):
    stock = build(architecture, "bidirectional", tie_word_embeddings=tied)
    backbone = started(build(architecture, "bidirectional", tie_word_embeddings=tied), center=True)
    assert backbone.decoder.weight.double().mean(0).abs().max() < 1e-6
    embeddings = backbone.model.get_input_embeddings().weight
    assert torch.equal(embeddings, stock.get_input_embeddings().weight)
    expected, before = centered(stock), alone(stock, batch(LENGTHS))
    assert close(logits(backbone).double(), expected)
    assert not close(before.double(), expected)
    assert close(before.softmax(-1), expected.softmax(-1).float())
    save(backbone, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert close(alone(again, batch(LENGTHS)).double(), expected)
    assert close(logits(load_encoder(tmp_path).backbone.eval()).double(), expected)


def test_centering_a_tied_decoder_costs_a_matrix_and_an_untied_one_nothing():
    for tied in (True, False):
        backbone = started(build("llama", None, tie_word_embeddings=tied))
        before = num_parameters(backbone)
        start_logits(backbone, center=True)
        assert num_parameters(backbone) - before == tied * 60 * 32


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_a_bias_that_a_checkpoint_has_no_place_for_is_kept_beside_it(attention, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers", "6.2")
    model = build("llama", attention, tie_word_embeddings=True)
    backbone = started(model, center=True, scale=0.5, shift=-2.0)
    with torch.no_grad():
        backbone.decoder.bias += torch.arange(60) / 60
    expected = 0.5 * centered(build("llama", attention, tie_word_embeddings=True))
    expected += torch.arange(60) / 60 - 2
    assert close(logits(backbone).double(), expected)
    encoder = SpladeEncoder(backbone, EagerHead())
    given = encode(encoder).sparse
    save_encoder(encoder, tmp_path, query_length=16, document_length=32)
    assert close(encode(load_encoder(tmp_path)).sparse, given)
    assert close(logits(pretrained(str(tmp_path)).eval()).double(), expected)
    card = (tmp_path / "README.md").read_text()
    assert f'SparseEncoder("{tmp_path.name}", trust_remote_code=True)' in card
    with pytest.raises(ValueError, match="trust_remote_code"):
        sentence_transformers.SparseEncoder(str(tmp_path), device="cpu")
    stock = sentence_transformers.SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)
    found = torch.as_tensor(stock.encode(TEXTS, convert_to_sparse_tensor=False))
    assert close(found, given)
    stock.save_pretrained(str(tmp_path / "theirs"))
    assert close(encode(load_encoder(tmp_path / "theirs")).sparse, given)
    stock[1].bias.data.zero_()
    assert not close(torch.as_tensor(stock.encode(TEXTS, convert_to_sparse_tensor=False)), given)


def test_a_bias_that_is_damaged_or_something_else_is_refused(tmp_path):
    save(started(build("llama", None), shift=-1.0), tmp_path)
    (file,) = tmp_path.glob("*/model.safetensors")
    save_file({"bias": torch.full((60,), torch.nan)}, file)
    with pytest.raises(ValueError, match=r"model\.safetensors: the weights bias are not all"):
        load_encoder(tmp_path)
    save_file({"weight": torch.zeros(60)}, file)
    with pytest.raises(ValueError, match=r"must hold one tensor, 'bias', and holds \['weight'\]"):
        load_encoder(tmp_path)
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_encoder(tmp_path)


def test_a_bias_of_its_own_learns_and_grows_with_the_vocabulary():
    backbone = started(build("llama", None), shift=-0.25)
    assert backbone.logit_bias is backbone.decoder.bias
    SpladeEncoder(backbone, SpartonHead())(batch(LENGTHS)).sum().backward()
    assert backbone.logit_bias.grad.any()
    with torch.no_grad():
        backbone.decoder.bias[:30] = -4
    backbone.add_tokens(["[Q] ", "[D] "])
    assert backbone.decoder.bias.tolist() == [-4.0] * 30 + [-0.25] * 30 + [-2.125] * 2
    assert backbone.decoder(backbone(batch(LENGTHS))).shape == (53, 62)


def test_what_cannot_be_folded_is_refused(build_mlm):
    with pytest.raises(ValueError, match="logit_scale=0 must be positive"):
        started(build("llama", None), scale=0)
    with pytest.raises(ValueError, match="center=True changes the decoder alone, but the head of "):
        started(build_mlm("bert"), center=True)
    backbone = Backbone(build_mlm("bert"), word_tokenizer(WORDS, 96))
    with pytest.raises(ValueError, match="has a bias of its own"):
        backbone.add_logit_bias(torch.zeros(60))
    bare = Backbone(build("llama", None), word_tokenizer(WORDS, 96))
    with pytest.raises(ValueError, match="has 60 vocabulary rows, and the bias of its logits 59"):
        bare.add_logit_bias(torch.zeros(59))


@pytest.mark.parametrize("family", ["distilbert", "modernbert"])
def test_masked_language_models_are_centered_too(family, build_mlm, tmp_path):
    backbone = started(build_mlm(family), center=True)
    tokens = batch(LENGTHS)
    plain = Backbone(build_mlm(family), word_tokenizer(WORDS, 96)).eval()
    states, weight = plain(tokens), plain.decoder.weight
    expected = plain.decoder(states) - (states @ weight.mean(0))[:, None]
    assert close(backbone.decoder(backbone(tokens)), expected)
    save(backbone, tmp_path)
    assert close(logits(load_encoder(tmp_path).backbone.eval()), expected)
