"""Causal language models as backbones, as they are and bidirectional.

The other side of each comparison is transformers' own model, given every text by itself.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.assembly import build_encoder
from sparton.models.backbone import Backbone
from sparton.models.backbones import bare, pretrained
from sparton.models.causal_lm import set_special_tokens
from sparton.models.checkpoint import load_lm
from sparton.models.colbert import ColbertHead
from sparton.models.folders import load_encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.models.words import word_tokenizer
from sparton.types import TokenBatch
from tests.models.alone import (
    alone,
    assert_same_logits_and_gradients,
    batch,
    close,
    states_attending,
)
from tests.models.causal_lms import ARCHITECTURES, ATTENTIONS, TEXTS, WORDS, build, encode, saved

LENGTHS = (3, 1, 30, 2, 17)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_gradients_are_those_of_texts_alone(architecture, attention, tokenizer):
    stock, tokens = build(architecture, attention), batch(LENGTHS)
    backbone = Backbone(build(architecture, attention), tokenizer).eval()
    assert backbone.layout.packed
    assert_same_logits_and_gradients(backbone, stock, tokens)
    other = build(architecture, ATTENTIONS[attention == ATTENTIONS[0]])
    assert not close(backbone.decoder(backbone(tokens)), alone(other, tokens))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_tokens_that_are_not_attended_to(attention, tokenizer):
    tokens = batch((4, 9))
    keys, expected = states_attending(build("qwen3", attention), tokens, (2, 3))
    backbone = Backbone(build("qwen3", attention), tokenizer).eval()
    assert close(backbone.hidden_states(tokens._replace(keys=keys)), expected)
    assert not close(backbone.hidden_states(tokens), expected)


SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "rotary_dim": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 96},
    "mimo_v2_flash": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "v_head_dim": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("gpt2", "packed"), ("codegen", "packed"), ("mpt", "padded"), ("mimo_v2_flash", "padded")],
)
def test_models_as_transformers_saves_them_run(kind, layout, tmp_path):
    """With its dropout of attention, without a token for padding, with a mask that it must have,
    with values of another width than keys."""
    config = AutoConfig.for_model(kind, vocab_size=60, **SIZES[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    word_tokenizer(WORDS, 96).save_pretrained(tmp_path)
    backbone = pretrained(str(tmp_path), attention="causal")
    assert layout in backbone.layout.name
    encoder = build_encoder(backbone, ColbertHead(8)).train()
    batch = TokenBatch.from_lists([[7, 9, 30, 12], [44, 45]])
    encoder.encode(batch, "document").tokens.values.sum().backward()
    assert all(x.grad is not None for x in encoder.head.parameters())


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("mpt", SIZES["mpt"], r"Mpt.* cannot run on a text by itself \(AttributeError: "),
        (
            "marian",
            {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4},
            "MarianDecoderWrapper does not say where its embeddings of tokens are",
        ),
    ],
)
def test_what_cannot_be_a_backbone_is_refused(kind, sizes, message, tmp_path):
    config = AutoConfig.for_model(kind, vocab_size=60, pad_token_id=0, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    word_tokenizer(WORDS, 96).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        build_encoder(pretrained(str(tmp_path), attention="bidirectional"), ColbertHead(8))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_saved_model_keeps_its_attention(attention, tokenizer, tmp_path):
    build("llama", None).save_pretrained(tmp_path / "stock")
    tokenizer.save_pretrained(tmp_path / "stock")
    tokens = batch(LENGTHS)
    backbone = pretrained(str(tmp_path / "stock"), attention=attention).eval()
    expected = alone(build("llama", attention), tokens)
    assert close(backbone.decoder(backbone(tokens)), expected)
    body = bare(str(tmp_path / "stock"), attention=attention).eval()
    assert close(body.hidden_states(tokens), backbone.hidden_states(tokens))
    with backbone.decoder_in_place() as whole:
        whole.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert close(alone(again, tokens), expected)
    assert close(alone(load_lm(str(tmp_path / "saved")).eval(), tokens), expected)


def test_the_fused_head_behind_a_causal_language_model(tokenizer):
    tokens = batch(LENGTHS)
    backbone = Backbone(build("mistral", "bidirectional"), tokenizer, gradient_checkpointing=True)
    sparse = SpladeEncoder(backbone, SpartonHead())(tokens)
    texts = alone(build("mistral", "bidirectional"), tokens).split(LENGTHS)
    expected = torch.stack([logits.amax(0).relu().log1p() for logits in texts])
    assert close(sparse, expected)
    assert not close(sparse.roll(1, 0), expected)
    sparse.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())


def test_flops_of_attention_are_those_of_its_heads_and_half_where_it_is_causal(tokenizer):
    """Qwen3's heads are wider than its states."""
    found = [
        Backbone(build("qwen3", attention), tokenizer).flops_per_token(20, training=False)
        for attention in ATTENTIONS
    ]
    matrices = 2 * (32 * 64 * 2 + 2 * 32 * 32 + 3 * 32 * 48) + 32 * 60
    scores = 2 * 4 * 64 * 20
    assert found == [2 * matrices + scores, 2 * matrices + scores / 2]


def test_attentions_that_do_not_exist_are_refused(build_mlm, tokenizer, tmp_path):
    build_mlm("bert").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is for causal language models.* but a Bert: leave"):
        pretrained(str(tmp_path), attention="causal")
    with pytest.raises(ValueError, match="attention='both' must be bidirectional or causal"):
        pretrained(str(tmp_path), attention="both")
    assert pretrained(str(tmp_path), attention="bidirectional").layout.packed


@pytest.mark.parametrize(
    "options", [{}, {"token_topk": 3, "folding": "terms.json"}, {"special_terms": False}]
)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_folders_load_in_sentence_transformers(attention, options, tmp_path, monkeypatch):
    """Also of heads that leave out terms of a decoder without a bias."""
    sentence_transformers = pytest.importorskip("sentence_transformers", "6.2")
    monkeypatch.chdir(tmp_path)
    Path("terms.json").write_text('{"[SEP]": null, "w7": "w9"}')
    model = build("llama", attention)
    encoder, given = saved(model, EagerHead(**options), tmp_path / "model")
    left_out = [3] if "special_terms" in options else [3, 7]  # [SEP] and w7
    assert given.sparse[:, left_out].any() != bool(options)
    tmp_path /= "model"
    trusted = {"trust_remote_code": True} if options else {}
    stock = sentence_transformers.SparseEncoder(str(tmp_path), device="cpu", **trusted)
    found = stock.encode(TEXTS, convert_to_sparse_tensor=False)
    assert close(torch.as_tensor(found), given.sparse)
    assert not close(torch.as_tensor(found).roll(1, 0), given.sparse)
    again = load_encoder(tmp_path)
    assert type(again) is type(encoder)
    assert close(encode(again).sparse, given.sparse)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_late_interaction_folders_load_in_sentence_transformers(attention, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers", "6.2")
    head = ColbertHead(16, query_marker="", document_marker="", query_expansion=False, skiplist=())
    _, given = saved(build("llama", attention), head, tmp_path)
    stock = sentence_transformers.MultiVectorEncoder(str(tmp_path), device="cpu")
    found = torch.cat([torch.as_tensor(each) for each in stock.encode_document(TEXTS)])
    assert close(found, given.tokens.values)
    assert not close(found.roll(1, 0), given.tokens.values)
    assert close(encode(load_encoder(tmp_path)).tokens.values, given.tokens.values)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma2"])
def test_attention_on_a_gpu_is_that_of_texts_alone(architecture, attention, tokenizer):
    """FlashAttention of grouped heads, causal or not, with windows; Gemma 2's bounded scores."""
    tokens = batch(LENGTHS)
    expected = alone(build(architecture, attention), tokens).detach()
    other = alone(build(architecture, ATTENTIONS[attention == ATTENTIONS[0]]), tokens).detach()
    backbone = Backbone(build(architecture, attention), tokenizer).eval().cuda()
    with torch.autocast("cuda", torch.bfloat16):
        logits = backbone.decoder(backbone(tokens.to("cuda")))
    error = (logits.float().cpu() - expected).norm() / expected.norm()
    logits.float().sum().backward()
    assert error < 0.03 < (other - expected).norm() / expected.norm()
    assert all(p.grad.isfinite().all() for p in backbone.parameters() if p.grad is not None)


@pytest.mark.parametrize(("special_tokens", "around"), [(None, 2), ("none", 0), ("eos", 1)])
def test_tokens_around_texts_are_chosen_and_kept(special_tokens, around, tmp_path):
    """Word-level tokenizers here put two around a text; what a tokenizer has stays its own."""
    tokenizer = word_tokenizer(WORDS, 96)
    tokenizer.eos_token = "[SEP]"
    build("llama", None).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    backbone = pretrained(str(tmp_path), special_tokens=special_tokens)
    ids = PackedTokenizer(backbone.tokenizer, 16, 32).documents(["w7 w9"]).input_ids.tolist()
    assert len(ids) == 2 + around
    assert ids[-1] == (tokenizer.eos_token_id if around else tokenizer.convert_tokens_to_ids("w9"))
    backbone.tokenizer.save_pretrained(tmp_path)
    again = pretrained(str(tmp_path)).tokenizer
    assert again("w7 w9")["input_ids"] == ids
    with pytest.raises(ValueError, match="special_tokens='bos' must be none or eos"):
        pretrained(str(tmp_path), special_tokens="bos")
    again.eos_token = None
    with pytest.raises(ValueError, match="has no token that ends a text"):
        set_special_tokens(again, "eos")
