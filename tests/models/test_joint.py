"""All halves of a joint encoder against the encoders that compute one of them alone."""

import pytest
import torch

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.assembly import build_encoder
from sparton.models.backbone import Backbone
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.dense import DenseEncoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.pooling import Pooling
from sparton.models.splade import SpladeEncoder
from sparton.models.words import word_tokenizer
from sparton.types import TokenBatch
from tests.models.alone import num_parameters
from tests.models.causal_lms import WORDS, build

TEXTS = ["w5 w6 w7", "", "w8 w9 w10 w11 w12", "w13"]


def encoder(build_mlm, family="bert", sparse=None, dense=None, **settings) -> JointEncoder:
    tokenizer = word_tokenizer([f"w{row}" for row in range(5, 60)], 96)
    backbone = Backbone(build_mlm(family), tokenizer)
    head = JointHead(sparse or EagerHead(), ColbertHead(8, skiplist=["w9"], **settings), dense)
    torch.manual_seed(0)
    return JointEncoder(backbone, head).eval()


def tokenize(model: JointEncoder) -> tuple[TokenBatch, TokenBatch]:
    tokenizer = PackedTokenizer(model.tokenizer, 12, 16, markup=model.markup)
    return tokenizer.queries(TEXTS), tokenizer.documents(TEXTS)


@pytest.mark.parametrize(
    ("sparse", "bias"), [(EagerHead(), True), (SpartonHead("sum", "log1p_relu"), False)]
)
def test_each_half_is_what_an_encoder_of_its_own_gives(family, build_mlm, sparse, bias):
    model = encoder(build_mlm, family, sparse, bias=bias)
    vectors = ColbertEncoder(model.backbone, model.head.tokens).eval()
    vectors.projection = model.projection
    terms = SpladeEncoder(model.backbone, model.head.sparse)
    queries, documents = tokenize(model)
    alone = PackedTokenizer(model.tokenizer, 12, 16, markup=model.markup._replace(expansion=None))
    for tokens, own, side in (
        (queries, alone.queries(TEXTS), "query"),
        (documents, documents, "document"),
    ):
        actual = model.encode(tokens, side)
        torch.testing.assert_close(actual.sparse, terms(own))
        torch.testing.assert_close(actual.sparse, terms(tokens))
        torch.testing.assert_close(actual.tokens.values, vectors(tokens, side).values)
        values, indices = model.topk(tokens, "query", 5)
        torch.testing.assert_close(values, actual.sparse.topk(5).values)
        torch.testing.assert_close(values, actual.sparse.gather(1, indices))
    seen = terms(queries._replace(keys=None))
    assert not torch.allclose(seen, terms(alone.queries(TEXTS)), atol=1e-3)
    assert actual.tokens.mask.sum() == documents.num_tokens - 1
    assert model.vocabulary_size == 62


@pytest.mark.parametrize("pooling", [Pooling("mean", True), Pooling("cls")])
@pytest.mark.parametrize("pools_prompt", [True, False])
def test_the_dense_half_pools_what_the_sparse_half_does(pooling, pools_prompt, build_mlm):
    sparse = EagerHead(include_prompt=pools_prompt)
    model = encoder(build_mlm, sparse=sparse, dense=pooling, query_prompt="w20 ")
    assert model.kinds == ("sparse", "tokens", "dense")
    alone = DenseEncoder(model.backbone, pooling, cosine=pooling.normalize).eval()
    queries, documents = tokenize(model)
    texts = PackedTokenizer(model.tokenizer, 12, 16, markup=model.markup._replace(expansion=None))
    for tokens, own, side in (
        (queries, texts.queries(TEXTS), "query"),
        (documents, texts.documents(TEXTS), "document"),
    ):
        dense = model.encode(tokens, side).dense
        torch.testing.assert_close(dense.values, alone.encode(own, side).tokens.values)
        assert dense.cu_seqlens.tolist() == list(range(len(TEXTS) + 1))
    expanded = alone.encode(queries._replace(keys=None, pooled=None), "query").tokens.values
    assert not torch.allclose(model.encode(queries, "query").dense.values, expanded, atol=1e-3)
    both = model.encode_both(queries, documents)
    for reps, tokens, side in zip(both, (queries, documents), ("query", "document"), strict=True):
        torch.testing.assert_close(reps.dense.values, model.encode(tokens, side).dense.values)


def test_the_body_runs_once_and_all_halves_reach_it(build_mlm):
    model = encoder(build_mlm, dense=Pooling("mean"))
    queries, _ = tokenize(model)
    calls: list[object] = []
    model.backbone.model.base_model.register_forward_hook(lambda *_: calls.append(None))
    given = model.encode(queries, "query")
    assert len(calls) == 1
    word = model.backbone.model.get_input_embeddings().weight
    outputs = given.sparse, given.tokens.values, given.dense.values.square()
    parts = [torch.autograd.grad(output.sum(), word, retain_graph=True)[0] for output in outputs]
    (together,) = torch.autograd.grad(sum(output.sum() for output in outputs), word)
    torch.testing.assert_close(together, sum(parts))
    assert all(part.any() for part in parts)


def test_parameters_are_counted_once(build_mlm):
    model = encoder(build_mlm)
    assert num_parameters(model) == num_parameters(model.backbone) + 8 * 32
    expected = model.backbone.flops_per_token(20, training=False) + 2 * 8 * 32
    assert model.flops_per_token(20, training=False) == expected


def test_a_batch_of_empty_texts():
    model = JointEncoder(tiny(TEXTS), JointHead(EagerHead(), ColbertHead(8)))
    reps = model.encode(TokenBatch.from_lists([[], []]), "document")
    assert reps.sparse.shape[0] == 2 and not reps.sparse.any()
    assert reps.tokens.values.shape == (0, 8)


def test_attention_to_the_expansion_is_refused():
    with pytest.raises(ValueError, match="leave it out of the head of the tokens"):
        JointHead(EagerHead(), ColbertHead(attend_to_expansion=True))
    with pytest.raises(ValueError, match="a joint head has one width"):
        JointHead(EagerHead(), ColbertHead(16, widths=[16, 4]))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"sparse": 1.0}, "score_weights=.* one number for each half, sparse and tokens"),
        ({"sparse": 1.0, "tokens": 1.0, "dense": 1.0}, "each half, sparse and tokens"),
        ({"sparse": -1.0, "tokens": 1.0}, "must be finite, not negative, and not all 0"),
        ({"sparse": 0.0, "tokens": 0}, "not all 0"),
    ],
)
def test_weights_of_scores_that_are_none_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        JointHead(EagerHead(), ColbertHead(8), score_weights=weights)


def test_a_pooling_that_cannot_be_is_refused(build_mlm):
    with pytest.raises(ValueError, match="pooling='max' is not one of mean, cls, last"):
        JointHead(EagerHead(), ColbertHead(8), Pooling("max"))
    backbone = Backbone(build("llama", "causal"), word_tokenizer(WORDS, 96))
    with pytest.raises(ValueError, match=r"cls pools the first token .* pool the last one"):
        JointEncoder(backbone, JointHead(EagerHead(), ColbertHead(8), Pooling("cls")))


def test_a_head_decides_the_kind_of_encoder(build_mlm, tokenizer):
    backbone = Backbone(build_mlm("bert"), tokenizer)
    joint = JointHead(EagerHead(), ColbertHead(query_marker="", document_marker=""))
    kinds = {joint.sparse: SpladeEncoder, joint.tokens: ColbertEncoder, joint: JointEncoder}
    for head, kind in kinds.items():
        assert type(build_encoder(backbone, head)) is kind
    bare = backbone.bare()
    assert type(build_encoder(bare, joint.tokens)) is ColbertEncoder
    for head in (joint, joint.sparse):
        with pytest.raises(ValueError, match=r"Head gives terms .* this BertModel has none"):
            build_encoder(bare, head)
    with pytest.raises(ValueError, match="Linear is no head of an encoder"):
        build_encoder(backbone, torch.nn.Linear(2, 2))
