"""Encoders with a side each: routing, gradients of both, one space of terms, and learning."""

from functools import partial

import pytest
import torch

from sparton.models.assembly import build_encoder
from sparton.models.asymmetric import separate_queries, shared_queries, static_queries
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder
from sparton.training.optimization import build_optimizer, learning_rates
from sparton.types import TokenBatch

TEXTS = ["the quick brown fox jumps over the lazy dog", "a lazy cat", "foxes hunt quick hens"]
TOKENS = TokenBatch.from_lists([[2, 5, 6, 7, 3], [2, 3], [2, 8, 9, 3]])


def backbone(layers: int = 1, texts: list[str] = TEXTS, max_length: int = 32):
    return tiny(texts, hidden_size=16, layers=layers, max_length=max_length, decoder_bias=-0.5)


@pytest.fixture
def document() -> SpladeEncoder:
    return SpladeEncoder(backbone(2), EagerHead())


def test_each_side_goes_to_its_encoder(document):
    encoder = separate_queries(document, backbone(), EagerHead())
    queries = encoder.encode(TOKENS, "query").sparse
    documents = encoder.encode(TOKENS, "document").sparse
    assert torch.equal(queries, encoder.query(TOKENS))
    assert torch.equal(documents, document(TOKENS))
    assert not torch.allclose(queries, documents)
    for side, dense in (("query", queries), ("document", documents)):
        values, indices = encoder.topk(TOKENS, side, 4)
        torch.testing.assert_close(values, dense.topk(4).values)
        torch.testing.assert_close(dense.gather(1, indices.long()), values)


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_reach_both_sides(document, frozen):
    encoder = static_queries(document, frozen=frozen)
    scores = encoder.encode(TOKENS, "query").sparse @ encoder.encode(TOKENS, "document").sparse.T
    scores.sum().backward()
    assert document.backbone.decoder.weight.grad.any()
    assert (encoder.query.weights.grad is None) == frozen
    twin = separate_queries(document, backbone(), EagerHead())
    twin.encode(TOKENS, "query").sparse.sum().backward()
    assert twin.query.backbone.decoder.weight.grad.any()


def test_static_queries_are_weighted_by_a_file(document, tmp_path):
    (tmp_path / "idf.json").write_text('{"fox": 2.5, "the": 0.0}')
    encoder = static_queries(document, tmp_path / "idf.json", missing=0.5)
    row = document.tokenizer.get_vocab()
    assert encoder.query.weights[[row["fox"], row["the"], row["lazy"]]].tolist() == [2.5, 0.0, 0.5]
    ones = static_queries(document).query.weights
    assert ones.sum() == len(row) - 5
    (tmp_path / "idf.json").write_text('{"fox": 2.5, "cow": 1.0}')
    with pytest.raises(ValueError, match="the first is 'cow'"):
        static_queries(document, tmp_path / "idf.json")


def test_properties(document):
    encoder = separate_queries(document, backbone(max_length=16), EagerHead())
    assert encoder.max_length == 16
    assert encoder.tokenizer is document.tokenizer
    assert encoder.query_tokenizer is encoder.query.tokenizer is not document.tokenizer
    assert encoder.vocabulary_size == document.vocabulary_size
    assert static_queries(document).max_length == 32
    assert shared_queries(document) is document


def test_each_side_counts_the_arithmetic_of_its_own_encoder(document):
    separate = separate_queries(document, backbone(), EagerHead())
    for training in (False, True):
        query, own = (
            separate.flops_per_token(8.0, side, training=training) for side in ("query", "document")
        )
        assert query == separate.query.flops_per_token(8.0, training=training)
        assert own == document.flops_per_token(8.0, training=training) > query > 0
    static = static_queries(document, frozen=False)
    assert static.flops_per_token(8.0, "query") == 0
    assert static.flops_per_token(8.0, "document") == document.flops_per_token(8.0, "query")


@pytest.mark.parametrize(
    ("build", "rates"),
    [
        (partial(static_queries, frozen=False, lr=0.5), {"query": 0.5}),
        (partial(static_queries, frozen=False), {}),
        (partial(static_queries, frozen=True, lr=0.5), {}),
        (partial(separate_queries, backbone=backbone(), head=EagerHead(), lr=0.5), {"query": 0.5}),
    ],
)
def test_the_query_encoder_may_learn_at_its_own_rate(document, build, rates):
    encoder = build(document)
    assert encoder.learning_rates() == rates
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    found = learning_rates(build_optimizer(encoder, adamw, 0.01, encoder.learning_rates()))
    assert found == {"learning_rate": 1e-3} | {f"learning_rate_{k}": v for k, v in rates.items()}


def test_vocabularies_of_different_size_are_refused(document):
    other = backbone(texts=[*TEXTS, "more words"])
    with pytest.raises(ValueError, match="has 20 vocabulary rows, the document encoder 18"):
        separate_queries(document, other, EagerHead())


def test_vocabularies_of_different_tokens_are_refused(document):
    other = backbone(texts=[text.replace("lazy", "zealous") for text in TEXTS])
    message = r"rows mean different tokens on the two sides; row 5 is 'quick' for .* 'lazy' for"
    with pytest.raises(ValueError, match=message):
        separate_queries(document, other, EagerHead())


def test_frozen_queries_are_not_regularized(document):
    assert static_queries(document, frozen=True).regularized == ("document",)
    for encoder in (
        static_queries(document),
        separate_queries(document, backbone(), EagerHead()),
    ):
        assert encoder.regularized == ("query", "document")


def test_learned_weights_are_counted(document):
    assert static_queries(document, frozen=True).figures() == {}
    encoder = static_queries(document)
    words = len(document.tokenizer) - 5
    assert encoder.figures()["query_positive_weights"] == words
    encoder.query.weights.data[7] = -1.0
    assert encoder.figures()["query_positive_weights"] == words - 1


def test_encoders_without_terms_are_refused(document):
    colbert = build_encoder(backbone(), ColbertHead(8))
    for build in (static_queries, partial(separate_queries, backbone=None, head=EagerHead())):
        with pytest.raises(ValueError, match="ColbertEncoder gives documents no weights"):
            build(colbert)
    with pytest.raises(ValueError, match="ColbertEncoder gives queries no weights"):
        separate_queries(document, backbone(), ColbertHead(8))
