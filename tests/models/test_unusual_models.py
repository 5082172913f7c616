"""Models and heads that are other than most: decoders of BERT's kind, heads that look for more than
states, heads that several encoders share."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    MobileBertConfig,
    MobileBertForMaskedLM,
)

from sparton.arguments import ArgumentError
from sparton.models.asymmetric import AsymmetricEncoder
from sparton.models.backbone import Backbone
from sparton.models.backbones import grafted, random_bert, tiny
from sparton.models.body import without_attention_dropout
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.csr import AutoencoderHead
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.fp8 import encoding_in_fp8
from sparton.models.heads import SpartonHead
from sparton.models.identity import weights_digest
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.logits import start_logits
from sparton.models.lora import Lora
from sparton.models.origin import front_matter
from sparton.models.splade import SpladeEncoder
from sparton.models.words import word_tokenizer
from sparton.types import TokenBatch
from tests.models.alone import batch, close
from tests.models.conftest import SIZES, VOCABULARY_SIZE

LENGTHS = (3, 1, 7)


def logits_alone(mlm: nn.Module, tokens: TokenBatch) -> Tensor:
    ids = tokens.input_ids.split(tokens.cu_seqlens.diff().tolist())
    with torch.no_grad():
        return torch.cat([mlm(input_ids=each[None]).logits[0] for each in ids])


def mlm_of(kind: str, auto: type = AutoModelForMaskedLM, **others) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | others)
    return auto.from_config(without_attention_dropout(config)).eval()


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_encoders_that_are_decoders_see_what_transformers_lets_them_see(kind, tokenizer):
    tokens, mlm = batch(LENGTHS), mlm_of(kind, is_decoder=True)
    with torch.no_grad():
        for parameter in mlm.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    expected = logits_alone(mlm, tokens)
    assert not close(logits_alone(mlm, batch(LENGTHS[::-1])), expected)
    backbone = Backbone(copy.deepcopy(mlm), tokenizer).eval()
    with torch.no_grad():
        assert close(backbone.decoder(backbone(tokens)), expected)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "xglm", "biogpt"])
def test_heads_that_look_for_more_than_states(kind, tokenizer):
    names = {"gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 96}}
    names["opt"] = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    names["xglm"] = {"d_model": 32, "num_layers": 2, "attention_heads": 2, "ffn_dim": 48}
    tokens, mlm = batch(LENGTHS), mlm_of(kind, AutoModelForCausalLM, **names.get(kind, {}))
    expected = logits_alone(mlm, tokens)
    backbone = Backbone(mlm, tokenizer).eval()
    with torch.no_grad():
        assert close(backbone.decoder(backbone(tokens)), expected)


def test_a_head_that_does_more_than_its_decoder_is_refused(tokenizer):
    mlm = mlm_of("esm", pad_token_id=0, mask_token_id=4, token_dropout=False)
    with pytest.raises(ValueError, match="the head of EsmForMaskedLM does not run in front of its"):
        Backbone(mlm, tokenizer)


def test_trying_a_head_leaves_the_generator_alone(tokenizer):
    torch.manual_seed(1)
    wanted = torch.rand(3)
    mlm = mlm_of("bert", hidden_dropout_prob=0.5).train()
    torch.manual_seed(1)
    Backbone(mlm, tokenizer)
    assert torch.equal(torch.rand(3), wanted)


def test_an_empty_batch_is_as_wide_as_the_decoder(tokenizer):
    mlm = mlm_of("electra", embedding_size=16)
    encoder = SpladeEncoder(Backbone(mlm, tokenizer), SpartonHead())
    reps = encoder(TokenBatch.from_lists([[], []]))
    assert reps.shape == (2, VOCABULARY_SIZE)
    reps.sum().backward()


def test_overlapping_blocks_encode_in_fp8_until_the_last_has_ended(tokenizer):
    head = SpartonHead()
    encoder = SpladeEncoder(random_bert(1000, 32, 2, 2), head)
    first, second = encoding_in_fp8(encoder), encoding_in_fp8(encoder)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert head.fp8
    second.__exit__(None, None, None)
    assert not head.fp8
    assert not any(getattr(part, "encoding_fp8", None) for part in encoder.modules())


def test_a_head_folds_one_vocabulary(tmp_path):
    one, other = (
        Backbone(mlm_of("bert", vocab_size=9), word_tokenizer(words, 96))
        for words in (["Paris", "paris", "x", "y"], ["x", "y", "Paris", "paris"])
    )
    head = SpartonHead(folding="case")
    SpladeEncoder(one, head)
    SpladeEncoder(one, head)
    with pytest.raises(ValueError, match="folds the terms of another vocabulary"):
        SpladeEncoder(other, head)


def test_narrowing_an_encoder_leaves_others_of_its_head(build_mlm, tokenizer):
    head = ColbertHead(8, widths=[8, 4])
    one, other = (
        ColbertEncoder(Backbone(build_mlm("bert"), copy.deepcopy(tokenizer)), head)
        for _ in range(2)
    )
    one.narrow(4)
    assert (one.head.width, one.head.widths) == (4, [4])
    assert (other.head.width, other.head.widths) == (8, [8, 4])


def test_a_vocabulary_that_need_not_grow_does_not():
    config = MobileBertConfig(
        **SIZES, embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16
    )
    tokenizer = word_tokenizer([f"w{row}" for row in range(5, VOCABULARY_SIZE)], 96)
    backbone = Backbone(MobileBertForMaskedLM(without_attention_dropout(config)), tokenizer)
    before = len(tokenizer)
    with pytest.raises(ValueError, match="cannot grow"):
        JointEncoder(backbone, JointHead(SpartonHead(), ColbertHead(8)))
    assert len(tokenizer) == before
    encoder = ColbertEncoder(backbone, ColbertHead(8))
    assert encoder.backbone.num_embeddings == len(tokenizer) == before + 2


def test_a_late_interaction_model_gets_its_head_back(build_mlm, tokenizer, tmp_path):
    mlm = build_mlm("bert")
    mlm.save_pretrained(tmp_path / "mlm")
    tokenizer.save_pretrained(tmp_path / "mlm")
    encoder = ColbertEncoder(Backbone(build_mlm("bert"), copy.deepcopy(tokenizer)), ColbertHead(8))
    save_encoder(encoder, tmp_path / "colbert", query_length=32, document_length=64)
    backbone = grafted(str(tmp_path / "colbert"), str(tmp_path / "mlm")).eval()
    rows = encoder.backbone.num_embeddings
    assert backbone.decoder.weight.shape == (rows, 32) and rows > VOCABULARY_SIZE
    tokens = batch(LENGTHS)
    with torch.no_grad():
        found = backbone.decoder(backbone(tokens))
        expected = logits_alone(mlm, tokens)
    assert close(found[:, :VOCABULARY_SIZE], expected)
    added = backbone.model.get_input_embeddings().weight[VOCABULARY_SIZE:]
    assert torch.equal(backbone.decoder.weight[VOCABULARY_SIZE:], added)
    bias = backbone.decoder.bias
    assert torch.allclose(bias[VOCABULARY_SIZE:], bias[:VOCABULARY_SIZE].mean())


def test_biases_beside_adapters_stay_fp32(tokenizer):
    mlm = mlm_of("bert", tie_word_embeddings=False)
    bias = torch.randn(VOCABULARY_SIZE)
    mlm.cls.predictions.decoder.bias.data.copy_(bias)
    backbone = Backbone(mlm, tokenizer, lora={"rank": 2})
    JointEncoder(backbone, JointHead(SpartonHead(), ColbertHead(8)))
    found = backbone.decoder.bias
    assert found.dtype == torch.float32 and torch.equal(found[:VOCABULARY_SIZE], bias)
    assert torch.allclose(found[VOCABULARY_SIZE:], bias.mean())


def test_two_models_that_repeat_texts_take_the_head_they_were_saved_with(tokenizer, tmp_path):
    def part() -> SpladeEncoder:
        return SpladeEncoder(
            Backbone(mlm_of("bert"), copy.deepcopy(tokenizer)), SpartonHead(echo=" w7 ")
        )

    query = part()
    torch.nn.init.normal_(query.backbone.decoder.bias)
    two = AsymmetricEncoder(query, part())
    save_encoder(two, tmp_path / "two", query_length=32, document_length=64)
    for head in (None, SpartonHead(echo=" w7 ")):
        assert load_encoder(str(tmp_path / "two"), head).markup.echo == " w7 "


@pytest.mark.parametrize("content", ["---\n\n---\n\n# model\n", "---\nMy model\n---\n"])
def test_a_card_without_metadata_says_nothing(content, tmp_path):
    (tmp_path / "README.md").write_text(content)
    assert front_matter(tmp_path / "README.md") == {}


def test_random_models_leave_the_generators_of_gpus_alone(monkeypatch):
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    random_bert(1000, 32, 1, 2, seed=7)
    tiny(["a b c"], hidden_size=32, layers=1, seed=7)
    assert seeds == []


def test_digests_take_numbers():
    one, other = (weights_digest({"a": torch.tensor(x)}) for x in (1.0, 2.0))
    assert one != other == weights_digest({"a": torch.tensor(2.0)})
    assert one == weights_digest({"a": torch.tensor([1.0])})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AutoencoderHead(k=2.5), "k=2.5 must be a whole number of at least 1"),
        (
            lambda: AutoencoderHead(reconstruction_weight=float("nan")),
            "reconstruction_weight=nan must be",
        ),
        (lambda: AutoencoderHead(learning_rate=-1.0), "learning_rate=-1.0 must be at least 0"),
        (lambda: ColbertHead(2.5), "width=2.5 must be a whole number of at least 1"),
        (lambda: ColbertHead(True), "width=True must be a whole number of at least 1"),
        (lambda: ColbertHead(pool_factor=float("nan")), "pool_factor=nan must be at least 1"),
        (lambda: Lora.of({"alpha": float("inf")}), "alpha=inf, which must be a finite number"),
        (lambda: start_logits(random_bert(100, 32, 1, 2), scale=float("inf")), "and finite"),
        (lambda: start_logits(random_bert(100, 32, 1, 2), shift=float("nan")), "must be finite"),
    ],
)
def test_numbers_that_are_none_are_refused(make, message):
    with pytest.raises((ArgumentError, ValueError), match=message):
        make()


def test_bert_is_fused_as_before(tokenizer):
    config = BertConfig(**SIZES)
    body = Backbone(BertForMaskedLM(without_attention_dropout(config)), tokenizer)
    assert any(type(part).__name__ == "FusedLayer" for part in body.modules())
