"""Checkpoints of GTE that name code of their own are read without it, as that code computes."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertTokenizer

from sparton.models import gte
from sparton.models.backbones import bare, pretrained
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder
from sparton.models.words import word_tokenizer
from sparton.reading import Fields
from sparton.types import TokenBatch
from tests.models.alone import alone, batch, close
from tests.models.gte import CONFIG, HEADS, LAYERS, needs_gte, write_checkpoint

LENGTHS = (3, 1, 30, 2, 17, 3)
WORDS = [f"w{row}" for row in range(5, 62)]
NTK = {"type": "ntk", "factor": 4.0}


def normed(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    gain, shift = (weights[f"{name}.{part}"] for part in ("weight", "bias"))
    return F.layer_norm(x, x.shape[-1:], gain, shift, 1e-12)


def turned(x: Tensor, theta: float, factor: float) -> Tensor:
    """Heads ``[H, S, d]`` by the angles of their positions; see section 2.1 of the paper."""
    d = x.shape[-1]
    speeds = (theta * factor) ** -(torch.arange(0, d, 2) / d) / factor ** (2 / d)
    turns = torch.polar(
        torch.ones(x.shape[1], d // 2), torch.arange(x.shape[1])[:, None] * speeds
    ).to(torch.complex128)
    turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turns
    return torch.cat((turned.real, turned.imag), dim=-1)


def logits(weights: dict[str, Tensor], text: Tensor, theta: float, factor: float) -> Tensor:
    """``[S, V]`` in fp64 of one text, without a model of transformers."""
    weights = {name: value.double() for name, value in weights.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    words = weights["new.embeddings.word_embeddings.weight"]
    x = words[text]
    if (kinds := weights.get("new.embeddings.token_type_embeddings.weight")) is not None:
        x = x + kinds[0]
    x = normed(x, weights, "new.embeddings.LayerNorm")
    for layer in (f"new.encoder.layer.{row}" for row in range(LAYERS)):
        query, key, value = (
            each.unflatten(-1, (HEADS, -1)).transpose(0, 1)
            for each in linear(x, f"{layer}.attention.qkv_proj").chunk(3, dim=-1)
        )
        query, key = (turned(each, theta, factor) for each in (query, key))
        seen = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value
        mixed = linear(seen.transpose(0, 1).flatten(1), f"{layer}.attention.o_proj")
        x = normed(x + mixed, weights, f"{layer}.attn_ln")
        up, gate = linear(x, f"{layer}.mlp.up_gate_proj").chunk(2, dim=-1)
        x = normed(
            x + linear(up * F.gelu(gate), f"{layer}.mlp.down_proj"), weights, f"{layer}.mlp_ln"
        )
    x = normed(F.gelu(linear(x, "lm_head.dense")), weights, "lm_head.norm")
    return x @ words.T + weights["lm_head.decoder.bias"]


@needs_gte
@pytest.mark.parametrize("kinds", [0, 1])
@pytest.mark.parametrize("scaling", [None, NTK], ids=["plain", "ntk"])
def test_a_checkpoint_with_code_of_its_own(scaling, kinds, tmp_path):
    weights = write_checkpoint(tmp_path / "a", rope_scaling=scaling, type_vocab_size=kinds)
    word_tokenizer(WORDS, 600).save_pretrained(tmp_path / "a")
    backbone, tokens = pretrained(str(tmp_path / "a")).eval(), batch(LENGTHS)
    assert (backbone.layout.name, backbone.max_length) == ("packed", 600)
    found = backbone.decoder(backbone(tokens))
    factor = 1.0 if scaling is None else scaling["factor"]
    texts = tokens.input_ids.split(LENGTHS)
    expected = torch.cat([logits(weights, text, 500000, factor) for text in texts]).float()
    assert close(found, expected)
    slower = torch.cat([logits(weights, text, 500000, 2 * factor) for text in texts]).float()
    assert not close(found, slower)
    states = bare(str(tmp_path / "a")).eval().hidden_states(tokens)
    assert close(states, backbone.hidden_states(tokens))
    backbone.save(tmp_path / "b")
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config["model_type"] == "gte" and "auto_map" not in config
    assert close(alone(AutoModelForMaskedLM.from_pretrained(tmp_path / "b").eval(), tokens), found)


@needs_gte
def test_sentence_transformers_has_the_same_representations(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    write_checkpoint(tmp_path / "a", rope_scaling=NTK)
    word_tokenizer(WORDS, 600).save_pretrained(tmp_path / "a")
    encoder = SpladeEncoder(pretrained(str(tmp_path / "a")), EagerHead()).eval()
    save_encoder(encoder, tmp_path / "b", query_length=16, document_length=16)
    texts = ["w7 w9 w30", "w44 w45 w8 w9 w10 w11 w12"]
    found = encoder(TokenBatch.from_lists(encoder.tokenizer(texts)["input_ids"]))
    stock = library.SparseEncoder(str(tmp_path / "b"), device="cpu")
    expected = stock.encode(texts, convert_to_sparse_tensor=False)
    assert close(found, expected) and not close(found.flip(0), expected)


@needs_gte
def test_a_decoder_of_its_own_is_saved(tmp_path):
    write_checkpoint(tmp_path / "a")
    word_tokenizer(WORDS, 600).save_pretrained(tmp_path / "a")
    backbone, tokens = pretrained(str(tmp_path / "a"), logit_scale=0.5).eval(), batch(LENGTHS)
    found = backbone.decoder(backbone(tokens))
    backbone.save(tmp_path / "b")
    again = pretrained(str(tmp_path / "b")).eval()
    assert close(again.decoder(again(tokens)), found)
    other = pretrained(str(tmp_path / "a")).eval()
    assert not close(other.decoder(other(tokens)), found)


@needs_gte
def test_its_tokenizer_stays_that_of_bert(tmp_path):
    """transformers takes XLM-RoBERTa's for GTE where nothing else is said."""
    write_checkpoint(tmp_path / "a")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fox", "##es", "lazy"]
    stock = BertTokenizer({piece: row for row, piece in enumerate(pieces)})
    stock.save_pretrained(tmp_path / "a")
    pretrained(str(tmp_path / "a")).save(tmp_path / "b")
    again = pretrained(str(tmp_path / "b")).tokenizer
    for tokenizer in (stock, again, AutoTokenizer.from_pretrained(tmp_path / "b")):
        assert tokenizer("Lazy FOXES")["input_ids"] == [2, 7, 5, 6, 3]


@needs_gte
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_scaling": {**NTK, "mixed_b": 0.5}}, "rope_scaling={.*has only the type 'ntk' "),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling={.*'yarn'"),
        ({"rope_scaling": {"type": "ntk"}}, "rope_scaling={'type': 'ntk'}.* by 1 to 1000"),
        ({"rope_scaling": {"type": "ntk", "factor": 1e300}}, "rope_scaling={.*1e.300"),
        ({"rope_theta": "fast"}, "rope_theta is 'fast', and must be a number"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type='absolute'.*'rope'"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type='rms_norm'.*has only 'layer_norm'"),
        ({"logn_attention_scale": True}, "logn_attention_scale=True"),
        ({"hidden_act": "relu"}, "hidden_act='relu'.*'gelu': choose another checkpoint"),
    ],
)
def test_what_transformers_does_not_compute_is_refused(settings, message, tmp_path):
    write_checkpoint(tmp_path, **settings)
    word_tokenizer(WORDS, 600).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path}/config.json:? (has )?{message}"):
        pretrained(str(tmp_path))


@pytest.mark.parametrize("kind", ["gte", "new"])
def test_an_older_transformers_is_told_of(kind, monkeypatch):
    monkeypatch.setattr(gte, "CONFIG_MAPPING", {})
    with pytest.raises(ValueError, match=r"^config.json describes a GTE model.*install transf"):
        gte.translated(Fields.of(CONFIG | {"model_type": kind}, "config.json"))
    assert gte.translated(Fields.of({"model_type": "bert"}, "config.json")) is None
