"""Packed tokens are those of the tokenizer, cut and laid end to end."""

import copy
import pickle

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from sparton.datasets.tokenization import PackedTokenizer
from sparton.types import TokenBatch


def assert_equal(left: TokenBatch, right: TokenBatch) -> None:
    for a, b in zip(left[:3], right[:3]):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert left.max_seqlen == right.max_seqlen


def test_equals_the_tokenizers_own_output(word_tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["w1 w2 w3", "", "strange w7", "w1 " * 50]
    tokenizer = PackedTokenizer(word_tokenizer, 4, 16)
    for batch, length in ((tokenizer.queries(texts), 4), (tokenizer.documents(texts), 16)):
        expected = word_tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        assert_equal(batch, TokenBatch.from_lists(expected))


def test_no_texts_and_huge_texts(word_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = PackedTokenizer(word_tokenizer, 8, 32)
    assert tokenizer.queries([]).num_sequences == 0
    batch = tokenizer.documents(["w9 " * 100_000, "w1"])
    assert batch.cu_seqlens.tolist() == [0, 32, 35]
    assert batch.input_ids[[0, 30, 31]].tolist() == [2, 13, 3]


def test_a_tokenizer_without_special_tokens_gives_empty_sequences(
    word_tokenizer: PreTrainedTokenizerFast,
) -> None:
    bare = copy.deepcopy(word_tokenizer)
    bare.backend_tokenizer.post_processor = None
    batch = PackedTokenizer(bare, 1, 2).documents(["", "w1", ""])
    assert batch.cu_seqlens.tolist() == [0, 0, 1, 1] and batch.max_seqlen == 1


def test_leaves_the_tokenizer_as_it_was_and_can_be_sent_to_a_process(
    word_tokenizer: PreTrainedTokenizerFast,
) -> None:
    before = word_tokenizer.backend_tokenizer.to_str()
    tokenizer = PackedTokenizer(word_tokenizer, 4, 16)
    batch = tokenizer.queries(["w1 w2 w3 w4"])
    assert word_tokenizer.backend_tokenizer.to_str() == before
    assert_equal(pickle.loads(pickle.dumps(tokenizer)).queries(["w1 w2 w3 w4"]), batch)


@pytest.mark.parametrize(
    ("query_length", "document_length", "message"),
    [
        (2, 16, "query_length=2 leaves no room for text beside 2 special tokens"),
        (8, 513, "document_length=513 is more than the 512 positions .*set document_length to 512"),
    ],
)
def test_impossible_lengths(
    word_tokenizer: PreTrainedTokenizerFast, query_length: int, document_length: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PackedTokenizer(word_tokenizer, query_length, document_length, max_length=512)


def test_slow_tokenizers_are_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match=r"Slow is a slow tokenizer.*tokenizer\.json"):
        PackedTokenizer(Slow(), 8, 8)  # type: ignore[arg-type]
