"""Texts that are read twice, with the second copy pooled, and the last token as an embedding.

The other side of each comparison is transformers' own model, given the ids written out by hand, or
sentence-transformers.
"""

import json

import pytest
import torch

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.asymmetric import static_queries
from sparton.models.backbone import Backbone
from sparton.models.backbones import bare
from sparton.models.causal_lm import set_special_tokens
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.dense import DenseEncoder
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import SpartonHead
from sparton.models.joint import JointHead
from sparton.models.pooling import Pooling
from sparton.models.splade import SpladeEncoder
from sparton.models.words import word_tokenizer
from sparton.types import Markup, TokenBatch
from tests.models.alone import close
from tests.models.causal_lms import ARCHITECTURES, TEXTS, WORDS, build, encode

CLS, SEP = 2, 3


def tokens(*, length: int = 16, around: str | None = None, **markup: object) -> TokenBatch:
    tokenizer = word_tokenizer(WORDS, 96)
    tokenizer.eos_token = "[SEP]"
    set_special_tokens(tokenizer, around)
    packed = PackedTokenizer(tokenizer, length, length, markup=Markup(**markup))
    return packed.documents(["w7 w9 w30", "", "w12"])


def test_the_ids_of_texts_that_are_read_twice():
    """Word-level: a word's row is its number, [CLS] and [SEP] stand around a text."""
    batch = tokens(echo=" w5 w6 ", document_prompt="w8 ", document_marker=50)
    first = [CLS, 50, 8, 7, 9, 30, 5, 6, 7, 9, 30, SEP]
    second, third = [CLS, 50, 8, 5, 6, SEP], [CLS, 50, 8, 12, 5, 6, 12, SEP]
    assert batch.input_ids.tolist() == first + second + third
    assert batch.cu_seqlens.tolist() == [0, 12, 18, 26]
    assert batch.pooled.rows.tolist() == [8, 9, 10, 11, 17, 24, 25]
    assert batch.pooled.cu_seqlens.tolist() == [0, 4, 5, 7]
    for around, closing in (("none", []), ("eos", [SEP])):
        batch = tokens(echo=" ", around=around)
        assert batch.input_ids.tolist()[: 6 + len(closing)] == [7, 9, 30, 7, 9, 30, *closing]
        assert batch.pooled.rows.tolist()[:3] == [3, 4, 5]


def test_both_copies_are_cut_alike():
    batch = tokens(echo=" w5 ", length=7)
    assert batch.input_ids.tolist()[:7] == [CLS, 7, 9, 5, 7, 9, SEP]
    batch = tokens(echo=" w5 ", length=8)
    assert batch.input_ids.tolist()[:7] == [CLS, 7, 9, 5, 7, 9, SEP]
    with pytest.raises(ValueError, match=r"beside 2 special tokens and 1 between .* 5 or more"):
        tokens(echo=" w5 ", length=4)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_the_second_copy_is_pooled_and_sees_the_whole_text(architecture, tmp_path):
    head = SpartonHead(echo=" w5 ")
    tokenizer = word_tokenizer(WORDS, 96)
    set_special_tokens(tokenizer, "none")
    encoder = SpladeEncoder(Backbone(build(architecture, "causal"), tokenizer), head).eval()
    stock, expected, first = build(architecture, "causal"), [], []
    for text in TEXTS:
        ids = [int(word[1:]) for word in text.split()]
        twice = torch.tensor([[*ids, 5, *ids]])
        logits = stock(input_ids=twice).logits[0]
        expected.append(logits[len(ids) + 1 :].amax(0).relu().log1p())
        first.append(logits[: len(ids)].amax(0).relu().log1p())
    expected, first = torch.stack(expected), torch.stack(first)
    assert close(encode(encoder).sparse, expected)
    assert not close(first, expected)
    save_encoder(encoder, tmp_path, query_length=16, document_length=32)
    assert "sentence-transformers reads texts once" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "sparton.json").read_text())["echo"] == " w5 "
    again = load_encoder(tmp_path)
    assert again.markup == encoder.markup
    assert close(encode(again).sparse, expected)
    with pytest.raises(ValueError, match=r"echo=None \(the folder: ' w5 '\)"):
        load_encoder(tmp_path, SpartonHead())


def test_heads_that_cannot_repeat_texts_say_so():
    backbone = Backbone(build("llama", "causal"), word_tokenizer(WORDS, 96))
    with pytest.raises(ValueError, match="a joint head reads the tokens of a text once, and echo="):
        JointHead(SpartonHead(echo=" "), ColbertHead(8, query_expansion=False))
    with pytest.raises(ValueError, match="echo is None for queries and ' ' for documents"):
        static_queries(SpladeEncoder(backbone, SpartonHead(echo=" ")))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES if each != "qwen2"])
def test_the_last_token_is_that_of_sentence_transformers(architecture, side, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers", "6.2")
    build(architecture, None).save_pretrained(tmp_path / "stock")
    tokenizer = word_tokenizer(WORDS, 96)
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(tmp_path / "stock")
    body = bare(str(tmp_path / "stock"), attention="causal", special_tokens="eos")
    encoder = DenseEncoder(body, Pooling("last", True)).eval()
    given = encode(encoder).tokens.values
    save_encoder(encoder, tmp_path / "own", query_length=16, document_length=32)
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "own"), device="cpu")
    model.tokenizer.padding_side = side
    assert close(torch.from_numpy(model.encode(TEXTS)), given)
    assert not close(encode(DenseEncoder(body, Pooling("mean", True))).tokens.values, given)
    model.save(str(tmp_path / "newer"))
    for folder in ("own", "newer"):
        again = load_encoder(tmp_path / folder)
        assert again.pooling == Pooling("last", True)
        assert close(encode(again).tokens.values, given)


def test_what_causal_attention_would_make_meaningless_is_refused():
    def backbone(attention: str) -> Backbone:
        return Backbone(build("llama", attention), word_tokenizer(WORDS, 96))

    with pytest.raises(ValueError, match="cls pools the first token of a text, which attends"):
        DenseEncoder(backbone("causal"), Pooling("cls"))
    head = ColbertHead(8, attend_to_expansion=True)
    with pytest.raises(ValueError, match="attend_to_expansion=True: where attention is causal no"):
        ColbertEncoder(backbone("causal"), head)
    assert DenseEncoder(backbone("bidirectional"), Pooling("cls"))
    assert ColbertEncoder(backbone("bidirectional"), head)
