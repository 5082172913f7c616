"""Prompts of SPLADE models, and of all heads that can leave them out of their pooling."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.asymmetric import separate_queries, static_queries
from sparton.models.backbone import Backbone
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.encoder import Encoder
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import CompiledHead, EagerHead, HybridHead, SpartonHead, TiledHead
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.splade import SpladeEncoder
from sparton.types import TextForm, TokenBatch

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["the quick brown fox jumps over the lazy dog", "a lazy cat", "foxes hunt quick hens", ""]
PROMPTS = {"query_prompt": "quick cat ", "document_prompt": "lazy "}


def splade(seed: int = 0, **settings: object) -> SpladeEncoder:
    torch.manual_seed(seed)
    backbone = tiny(TEXTS, hidden_size=32, layers=1, seed=seed)
    with torch.no_grad():
        backbone.decoder.bias.add_(2 * torch.rand(backbone.decoder.out_features))
    return SpladeEncoder(backbone, EagerHead(**settings)).eval()


def tokens_of(encoder: Encoder, length: int = 14) -> tuple[TokenBatch, TokenBatch]:
    tokenizer = PackedTokenizer(encoder.tokenizer, length, length, markup=encoder.markup)
    return tokenizer.queries(TEXTS), tokenizer.documents(TEXTS)


def save(encoder: Encoder, path: Path) -> Path:
    save_encoder(encoder, path, query_length=14, document_length=14)
    return path


@torch.no_grad()
def pooled_elsewhere(model, task: str, *, include_prompt: bool) -> Tensor:
    """What sentence-transformers computes, with a mask on the prompt between its modules, as its
    own Pooling has one for embeddings."""
    prompt = model.prompts[task]
    features = model[0](model.preprocess(TEXTS, prompt=prompt))
    if not include_prompt:
        features["attention_mask"][:, : model[0]._get_prompt_length(prompt)] = 0
    return model[1](features)["sentence_embedding"]


@pytest.mark.parametrize("include_prompt", [True, False])
def test_a_prompt_is_attended_to_and_pooled_or_not(include_prompt, tmp_path):
    encoder = splade(include_prompt=include_prompt, **PROMPTS)
    model = sentence_transformers.SparseEncoder(str(save(encoder, tmp_path / "own")), device="cpu")
    model.save(str(tmp_path / "newer"))
    assert model.prompts == {"query": "quick cat ", "document": "lazy "}
    for task, tokens in zip(("query", "document"), tokens_of(encoder), strict=True):
        expected = pooled_elsewhere(model, task, include_prompt=include_prompt)
        torch.testing.assert_close(encoder(tokens), expected)
        other = pooled_elsewhere(model, task, include_prompt=not include_prompt)
        assert not torch.allclose(encoder(tokens), other, atol=1e-3)
        values, indices = encoder.topk(tokens, "query", 5)
        torch.testing.assert_close(values, expected.gather(1, indices))
    card = (tmp_path / "own/README.md").read_text()
    assert "| before a query | `quick cat ` |" in card
    assert ("sentence-transformers pools all tokens" in card) == (not include_prompt)
    # What sentence-transformers writes has the prompts, but not whether they are pooled.
    assert load_encoder(tmp_path / "own").markup == encoder.markup
    assert load_encoder(tmp_path / "newer").markup == encoder.markup._replace(include_prompt=True)


@pytest.mark.slow
def test_every_head_pools_the_same_tokens(build_mlm, tokenizer):
    backbone = Backbone(build_mlm("bert"), tokenizer).eval()
    prompts = {"query_prompt": "w9 w8 ", "include_prompt": False}
    tokenizer = PackedTokenizer(
        tokenizer, 8, 8, markup=SpladeEncoder(backbone, EagerHead(**prompts)).markup
    )
    tokens = tokenizer.queries(["w20 w21", "w22", ""])
    logits = backbone.decoder(backbone(tokens))
    rows = [logits[3:6], logits[9:11], logits[14:15]]  # after [CLS] and the prompt
    maxima = torch.log1p(torch.relu(torch.stack([row.amax(0) for row in rows])))
    for head in (EagerHead, CompiledHead, TiledHead, HybridHead, SpartonHead):
        torch.testing.assert_close(SpladeEncoder(backbone, head(**prompts))(tokens), maxima)
    of_all = torch.log1p(
        torch.relu(torch.stack([logits[:6].amax(0), *[r.amax(0) for r in rows[1:]]]))
    )
    assert not torch.allclose(maxima, of_all, atol=1e-3)
    both = SpladeEncoder(backbone, EagerHead(**prompts)).encode_both(tokens, tokens)
    assert all(torch.allclose(side.sparse, maxima, atol=1e-5) for side in both)


@pytest.mark.gpu
def test_one_pass_of_both_sides_pools_the_same_tokens_on_a_gpu():
    encoder = SpladeEncoder(splade().backbone, SpartonHead(include_prompt=False, **PROMPTS))
    encoder = encoder.eval().cuda()
    sides = [tokens.to("cuda") for tokens in tokens_of(encoder)]
    with torch.autocast("cuda", torch.bfloat16):
        together = encoder.encode_both(*sides)
        apart = [encoder(side) for side in sides]
        whole = [encoder(side._replace(pooled=None)) for side in sides]
    for one, other, of_all in zip(together, apart, whole, strict=True):
        torch.testing.assert_close(one.sparse, other, rtol=0.02, atol=0.02)
        assert not torch.allclose(one.sparse, of_all, rtol=0.02, atol=0.02)


def test_a_source_may_have_prompts_of_its_own():
    encoder = splade(include_prompt=False)
    tokenizer = PackedTokenizer(encoder.tokenizer, 14, 14, markup=encoder.markup)
    prompted = splade(include_prompt=False, **PROMPTS)
    queries, _ = tokens_of(prompted)
    given = tokenizer.queries(TEXTS, TextForm(query_prompt="quick cat "))
    assert torch.equal(encoder(given), prompted(queries))
    assert not torch.allclose(encoder(tokenizer.queries(TEXTS)), prompted(queries), atol=1e-3)


def joint(include_prompt: bool, **prompts: str) -> JointEncoder:
    torch.manual_seed(0)
    head = JointHead(EagerHead(include_prompt=include_prompt), ColbertHead(8, **prompts))
    return JointEncoder(tiny(TEXTS, hidden_size=32, layers=1), head).eval()


def test_either_half_of_a_joint_encoder_reads_the_prompt(tmp_path):
    encoder, other = joint(False, **PROMPTS), joint(True, **PROMPTS)
    other.load_state_dict(encoder.state_dict())
    again = load_encoder(save(encoder, tmp_path / "model"), encoder.head).eval()
    assert again.markup == encoder.markup and not load_encoder(tmp_path / "model").markup[-1]
    for side, tokens, included in zip(
        ("query", "document"), tokens_of(encoder), tokens_of(other), strict=True
    ):
        given, pooled = encoder.encode(tokens, side), other.encode(included, side)
        assert torch.equal(again.encode(tokens, side).sparse, given.sparse)
        assert torch.equal(given.tokens.values, pooled.tokens.values)  # a vector of every token
        assert not torch.allclose(given.sparse, pooled.sparse, atol=1e-3)
        alone = SpladeEncoder(encoder.backbone, encoder.head.sparse)
        assert torch.equal(alone(tokens), given.sparse)
    with pytest.raises(ValueError, match=r"include_prompt=True \(the folder: False\)"):
        load_encoder(tmp_path / "model", other.head)
    with pytest.raises(ValueError, match=r"query_prompt='a ' stands in its sparse half"):
        JointHead(EagerHead(query_prompt="a "), ColbertHead(8))


def test_a_head_has_the_prompts_of_the_folder(tmp_path):
    encoder = splade(**PROMPTS)
    save(encoder, tmp_path / "model")
    assert load_encoder(tmp_path / "model", EagerHead(**PROMPTS)).markup == encoder.markup
    for given, message in (
        ({}, r"query_prompt='' \(the folder: 'quick cat '\)"),
        ({**PROMPTS, "include_prompt": False}, r"include_prompt=False \(the folder: True\)"),
    ):
        with pytest.raises(ValueError, match=message):
            load_encoder(tmp_path / "model", EagerHead(**given))
    description = tmp_path / "model/config_sentence_transformers.json"
    content = json.loads(description.read_text())
    del content["prompts"]
    description.write_text(json.dumps(content))
    head = EagerHead(query_prompt="a ")
    assert load_encoder(tmp_path / "model", head).markup == head.markup  # the folder does not say


def test_each_side_of_two_encoders_has_its_own_prompt(tmp_path):
    document = splade(document_prompt="lazy ", include_prompt=False)
    head = EagerHead(query_prompt="quick ", include_prompt=False)
    encoder = separate_queries(document, splade(seed=1).backbone, head).eval()
    expected = head.markup._replace(document_prompt="lazy ")
    assert encoder.markup == expected
    again = load_encoder(save(encoder, tmp_path / "model"), document.head).eval()
    assert again.markup == expected
    for side, tokens in zip(("query", "document"), tokens_of(encoder), strict=True):
        assert torch.equal(again.encode(tokens, side).sparse, encoder.encode(tokens, side).sparse)
    model = sentence_transformers.SparseEncoder(str(tmp_path / "model"), device="cpu")
    assert model.prompts == {"query": "quick ", "document": "lazy "}
    with pytest.raises(ValueError, match=r"query_prompt='quick cat ' stands in .*encode queries"):
        static_queries(splade(**PROMPTS))
    with pytest.raises(ValueError, match=r"document_prompt='a ' stands in .*encode documents"):
        separate_queries(document, splade(seed=1).backbone, EagerHead(document_prompt="a "))
    with pytest.raises(ValueError, match="include_prompt is True for queries and False for doc"):
        separate_queries(document, splade(seed=1).backbone, EagerHead(query_prompt="a "))


def test_static_queries_may_leave_their_prompt_out(tmp_path):
    """A prompt that a folder has counts as text, as in sentence-transformers, unless it says so."""
    encoder = static_queries(splade())
    encoder.markup = encoder.markup._replace(query_prompt="quick cat ")
    model = sentence_transformers.SparseEncoder(
        str(save(encoder, tmp_path / "model")), device="cpu"
    )
    queries, _ = tokens_of(load_encoder(tmp_path / "model"))
    expected = model.encode_query(TEXTS, convert_to_sparse_tensor=False)
    torch.testing.assert_close(encoder.query(queries), expected)
    encoder.markup = encoder.markup._replace(include_prompt=False)
    queries, _ = tokens_of(encoder)
    plain, _ = tokens_of(static_queries(splade()))
    assert torch.equal(encoder.query(queries), encoder.query(plain))
    assert not torch.equal(encoder.query(queries), expected)
