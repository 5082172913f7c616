"""Static encoders against a plain formula, autograd, and sentence-transformers' module."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.static import StaticEncoder, static_weights
from sparton.models.words import word_tokenizer
from sparton.types import TokenBatch
from tests.devices import nothing_waits

WORDS = ["red", "green", "blue", "fox", "hen", "the"]
TEXTS = ["the red fox the fox", "", "blue hen unheard", "the [SEP] hen"]
ROWS = 5 + len(WORDS)
PADDED = ROWS + 6


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(WORDS, 32)


def tokens(tokenizer: PreTrainedTokenizerFast, texts: list[str] = TEXTS) -> TokenBatch:
    return PackedTokenizer(tokenizer, 16, 16).queries(texts)


def random_weights(rows: int = PADDED, seed: int = 0) -> Tensor:
    weights = torch.randn(rows, generator=torch.Generator().manual_seed(seed))
    weights[ROWS:] = 0
    return weights


def presence(tokenizer: PreTrainedTokenizerFast, rows: int) -> Tensor:
    """The plain reference: whether each text has each regular token."""
    words = [{word for word in text.split() if word in WORDS} for text in TEXTS]
    vocabulary = tokenizer.get_vocab()
    found = torch.zeros(len(TEXTS), rows)
    for row, present in enumerate(words):
        for word in present:
            found[row, vocabulary[word]] = 1
    return found


@pytest.mark.parametrize("rows", [ROWS, PADDED])
def test_a_text_is_the_set_of_its_tokens(tokenizer, rows):
    weights = static_weights(tokenizer, rows, {word: 0.5 + i for i, word in enumerate(WORDS)})
    actual = StaticEncoder(weights, tokenizer)(tokens(tokenizer))
    assert actual.dtype == torch.float32
    assert torch.equal(actual, presence(tokenizer, rows) * weights)
    assert not torch.equal(actual, (presence(tokenizer, rows) * weights).roll(1, 0))
    assert (actual[0] > 0).sum() == 3 and not actual[1].any()
    assert not actual[:, ROWS:].any()


def test_a_batch_without_texts_or_tokens(tokenizer):
    encoder = StaticEncoder(torch.ones(ROWS), tokenizer)
    assert encoder(TokenBatch.from_lists([])).shape == (0, ROWS)
    assert torch.equal(encoder(TokenBatch.from_lists([[], []])), torch.zeros(2, ROWS))


def test_gradients_are_those_of_the_plain_formula(tokenizer):
    weights = random_weights()
    encoder = StaticEncoder(weights, tokenizer, frozen=False)
    upstream = torch.randn(len(TEXTS), PADDED)
    encoder(tokens(tokenizer)).backward(upstream)
    plain = weights.clone().requires_grad_()
    (presence(tokenizer, PADDED) * plain.relu()).backward(upstream)
    torch.testing.assert_close(encoder.weights.grad[5:], plain.grad[5:])
    assert encoder.weights.grad[5:].any()
    scaled = 1.01 * plain.grad[5:]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(encoder.weights.grad[5:], scaled)
    again = StaticEncoder(weights, tokenizer, frozen=False)
    again(tokens(tokenizer)).backward(upstream)
    assert torch.equal(again.weights.grad, encoder.weights.grad)


def test_what_is_left_out_stays_out(tokenizer):
    """Framing tokens, rows of padding and weights below zero: no weight and no gradient."""
    weights = random_weights()
    encoder = StaticEncoder(weights, tokenizer, frozen=False)
    reps = encoder(tokens(tokenizer))
    reps.sum().backward()
    out = [*tokenizer("")["input_ids"], *range(ROWS, PADDED)]
    assert (encoder.weights[out] == 0).all()
    assert (encoder.weights.grad[out] == 0).all()
    assert (reps >= 0).all()
    negative = weights[5:ROWS] <= 0
    assert 0 < negative.sum() < ROWS - 5
    assert (encoder.weights.grad[5:ROWS][negative] == 0).all()
    assert (encoder.weights.grad[5:ROWS][~negative] > 0).any()


def test_special_tokens_start_at_zero(tokenizer):
    for idf in (None, {"[UNK]": 3.0, "fox": 2.0}):
        weights = static_weights(tokenizer, PADDED, idf, missing=0.25)
        assert not weights[tokenizer.all_special_ids].any() and not weights[ROWS:].any()
        assert weights[tokenizer.get_vocab()["hen"]] == (1.0 if idf is None else 0.25)
    assert weights[tokenizer.get_vocab()["fox"]] == 2


def test_equal_to_the_module_of_sentence_transformers(tokenizer):
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
    weights = static_weights(tokenizer, ROWS, {word: 0.5 + i for i, word in enumerate(WORDS)})
    module = modules.SparseStaticEmbedding(tokenizer, weights.clone())
    upstream = torch.randn(len(TEXTS), ROWS)
    theirs = module(module.preprocess(TEXTS))["sentence_embedding"]
    theirs.backward(upstream)
    encoder = StaticEncoder(weights, tokenizer, frozen=False)
    ours = encoder(tokens(tokenizer))
    ours.backward(upstream)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(encoder.weights.grad[5:], module.weight.grad[5:])
    module.weight.data.mul_(1.01)
    assert not torch.allclose(ours, module(module.preprocess(TEXTS))["sentence_embedding"])


@pytest.mark.parametrize("k", [1, 4, PADDED + 3])
def test_topk_is_a_stable_sort(tokenizer, k):
    weights = random_weights().abs()
    weights[7] = weights[8]
    encoder = StaticEncoder(weights, tokenizer, frozen=False)
    values, indices = encoder.topk(tokens(tokenizer), "query", k)
    expected = encoder(tokens(tokenizer)).detach()
    order = [sorted(range(PADDED), key=lambda v: (-row[v].item(), v))[:k] for row in expected]
    assert indices.tolist() == order
    assert torch.equal(values, expected.gather(1, indices))
    assert not values.requires_grad


def test_half_precision_still_gives_fp32(tokenizer):
    encoder = StaticEncoder(random_weights(), tokenizer).bfloat16()
    assert encoder(tokens(tokenizer)).dtype == torch.float32


def test_properties(tokenizer):
    encoder = StaticEncoder(torch.ones(PADDED), tokenizer, frozen=True)
    assert (encoder.vocabulary_size, encoder.max_length, encoder.frozen) == (PADDED, None, True)
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    assert not StaticEncoder(torch.ones(PADDED), tokenizer).frozen
    assert encoder.flops_per_token(8.0) == 0
    assert encoder.encode(tokens(tokenizer), "query").num_texts == len(TEXTS)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(ROWS - 1), r"shape \(10,\) for a tokenizer whose last token has the id 10"),
        (torch.ones(1, ROWS), r"shape \(1, 11\)"),
        (torch.full((ROWS,), float("nan")), "must be finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tokenizer, weights, message):
    with pytest.raises(ValueError, match=message):
        StaticEncoder(weights, tokenizer)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tokenizer):
    with pytest.raises(ValueError, match="11 tokens does not fit a vocabulary of 10 rows"):
        static_weights(tokenizer, ROWS - 1)


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu_without_waiting(tokenizer):
    batch = tokens(tokenizer)
    upstream = torch.randn(len(TEXTS), PADDED)
    encoder = StaticEncoder(random_weights(), tokenizer, frozen=False)
    expected = encoder(batch)
    expected.backward(upstream)
    gradient = encoder.weights.grad
    there = StaticEncoder(random_weights(), tokenizer, frozen=False).cuda()
    batch, upstream = batch.to("cuda"), upstream.cuda()
    with nothing_waits():
        actual = there(batch)
        actual.backward(upstream)
    assert torch.equal(actual.cpu(), expected)
    torch.testing.assert_close(there.weights.grad.cpu(), gradient)
