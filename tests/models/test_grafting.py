"""A masked-LM head on another body, against the two models it is made of."""

import pytest
import torch
from transformers import AutoModelForMaskedLM

from sparton.models.backbone import Backbone
from sparton.models.backbones import grafted
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder
from sparton.models.words import word_tokenizer
from sparton.types import TokenBatch

TOKENS = TokenBatch.from_lists([[5, 6, 7], list(range(8, 30))])


@pytest.fixture
def parts(family, build_mlm, tokenizer, tmp_path):
    """Folders of a body and of a masked-language model, with weights of their own, and what the
    graft of both gives for each token."""
    body, mlm = build_mlm(family).base_model, build_mlm(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for model in (body, mlm):
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        for folder, model in (("body", body), ("mlm", mlm)):
            model.save_pretrained(tmp_path / folder)
            tokenizer.save_pretrained(tmp_path / folder)
        hidden = (
            Backbone(with_body(build_mlm(family), body), tokenizer).eval().hidden_states(TOKENS)
        )
        head = Backbone(mlm, tokenizer).eval()
        expected = head.decoder(head.transform(hidden))
    return str(tmp_path / "body"), str(tmp_path / "mlm"), expected


def with_body(mlm, body):
    mlm.base_model.load_state_dict(body.state_dict(), strict=False)
    return mlm


def logits(backbone: Backbone) -> torch.Tensor:
    with torch.no_grad():
        return backbone.decoder(backbone.eval()(TOKENS))


def test_the_head_reads_the_states_of_the_other_body(parts):
    body, mlm, expected = parts
    backbone = grafted(body, mlm)
    torch.testing.assert_close(logits(backbone), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(grafted(mlm, mlm)), expected, atol=1e-2)
    embeddings = backbone.model.get_input_embeddings().weight
    assert embeddings.data_ptr() != backbone.decoder.weight.data_ptr()
    assert not torch.allclose(embeddings, backbone.decoder.weight, atol=1e-2)


def test_its_logits_start_where_they_are_told_to(parts):
    body, mlm, expected = parts
    started = logits(grafted(body, mlm, logit_scale=0.5, logit_shift=-15.0))
    torch.testing.assert_close(started, expected / 2 - 15, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(started, expected - 15, atol=1e-2)


def test_its_folder_loads_here_and_in_transformers_with_the_same_scores(parts, tmp_path):
    encoder = SpladeEncoder(grafted(*parts[:2]), EagerHead()).eval()
    with torch.no_grad():
        if encoder.backbone.decoder.bias is not None:
            encoder.backbone.decoder.bias += torch.arange(len(encoder.backbone.decoder.bias)) / 99
        expected = encoder(TOKENS)
    save_encoder(encoder, tmp_path / "saved", query_length=8, document_length=32)
    again = load_encoder(tmp_path / "saved", EagerHead()).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS), expected)
        model = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved").eval()
        row = model(torch.tensor([[5, 6, 7]])).logits[0]
    torch.testing.assert_close(row.relu().log1p().amax(0), expected[0], rtol=1e-4, atol=1e-4)
    weight = model.get_input_embeddings().weight
    assert not torch.allclose(weight, model.get_output_embeddings().weight, atol=1e-2)
    save_encoder(again, tmp_path / "twice", query_length=8, document_length=32)
    with torch.no_grad():
        torch.testing.assert_close(load_encoder(tmp_path / "twice").eval()(TOKENS), expected)


def test_both_matrices_learn_by_themselves(parts):
    encoder = SpladeEncoder(grafted(*parts[:2]), EagerHead())
    encoder(TOKENS).sum().backward()
    embeddings = encoder.backbone.model.get_input_embeddings().weight
    decoder = encoder.backbone.decoder.weight
    for weight in (embeddings, decoder):
        assert weight.grad is not None and weight.grad.abs().sum() > 0
    assert not torch.allclose(embeddings.grad, decoder.grad)


def test_what_does_not_fit_is_refused_by_name(build_mlm, tokenizer, tmp_path):
    bert = build_mlm("bert")
    others = word_tokenizer([f"x{row}" for row in range(5, len(tokenizer))], 64)
    for folder, model, words in (
        ("bert", bert, tokenizer),
        ("distilbert", build_mlm("distilbert"), tokenizer),
        ("words", bert, others),
    ):
        model.save_pretrained(tmp_path / folder)
        words.save_pretrained(tmp_path / folder)
    body = str(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"bert has BertModel, and .*distilbert has DistilBertM"):
        grafted(body, str(tmp_path / "distilbert"))
    with pytest.raises(ValueError, match=r"bert has token 'x5' as None, and .*words has it as 5"):
        grafted(body, str(tmp_path / "words"))
    bert.config.hidden_act = "relu"
    bert.save_pretrained(tmp_path / "relu")
    tokenizer.save_pretrained(tmp_path / "relu")
    with pytest.raises(ValueError, match=r"has hidden_act=gelu, and .*relu has hidden_act=relu"):
        grafted(body, str(tmp_path / "relu"))
