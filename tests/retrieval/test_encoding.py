"""Encoding collections: the order, the batches and the modes must not show in the result."""

import numpy as np
import pytest
import torch
from torch import nn

from sparton.packing import sequence_ids
from sparton.retrieval import encoding
from sparton.retrieval.encoding import encode_texts
from sparton.types import TokenBatch

VOCABULARY = 23


class CountingEncoder(nn.Module):
    """Counts each token id; remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.batches: list[tuple[int, int]] = []
        self.states: list[tuple[bool, bool, bool]] = []

    def forward(self, tokens: TokenBatch) -> torch.Tensor:
        self.batches.append((tokens.num_sequences, tokens.max_seqlen))
        autocast = torch.is_autocast_enabled("cpu")
        self.states.append((self.training, torch.is_grad_enabled(), autocast))
        owners = sequence_ids(tokens.cu_seqlens, tokens.num_tokens)
        reps = torch.zeros(tokens.num_sequences, VOCABULARY)
        ones = self.scale * torch.ones(tokens.num_tokens)
        return reps.index_put((owners, tokens.input_ids), ones, accumulate=True)


def tokenize(texts: list[str]) -> TokenBatch:
    return TokenBatch.from_lists([[int(word) for word in text.split()] for text in texts])


def random_texts(count: int, longest: int = 12) -> list[str]:
    rng = np.random.default_rng(0)
    return [
        " ".join(map(str, rng.integers(0, VOCABULARY, rng.integers(0, longest))))
        for _ in range(count)
    ]


@pytest.mark.parametrize("batch_tokens", [1, 25, 10_000])
@pytest.mark.parametrize("batch_sequences", [1, 4, 256])
@pytest.mark.parametrize("at_once", [3, 2048])
def test_rows_are_those_of_single_texts_in_order(
    monkeypatch, batch_tokens, batch_sequences, at_once
):
    monkeypatch.setattr(encoding, "_TEXTS_TOKENIZED_AT_ONCE", at_once)
    texts, encoder = random_texts(50), CountingEncoder()
    rows = encode_texts(
        encoder, tokenize, texts, batch_tokens=batch_tokens, batch_sequences=batch_sequences
    )
    assert (rows.num_rows, rows.width) == (50, VOCABULARY)
    for row, text in enumerate(texts):
        words, counts = np.unique([int(word) for word in text.split()], return_counts=True)
        span = slice(rows.indptr[row], rows.indptr[row + 1])
        np.testing.assert_array_equal(rows.indices[span], words)
        np.testing.assert_array_equal(rows.values[span], counts)
    for sequences, longest in encoder.batches:
        assert sequences <= batch_sequences
        assert sequences == 1 or sequences * longest <= batch_tokens
    if batch_tokens == 25 and at_once == 2048 and batch_sequences > 1:
        assert len(encoder.batches) < 30, "texts of like length must share batches"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_encoder_is_in_evaluation_mode_without_gradients(training, bf16):
    encoder = CountingEncoder().train(training)
    encode_texts(encoder, tokenize, ["1 2", "3"], bf16=bf16)
    assert encoder.training is training
    assert set(encoder.states) == {(False, False, bf16)}


@pytest.mark.parametrize("text", ["nonsense", "1 99"])
def test_faults_pass_through_and_leave_the_mode(text):
    encoder = CountingEncoder().train()
    with pytest.raises((ValueError, IndexError)):
        encode_texts(encoder, tokenize, ["1", text])
    assert encoder.training


def test_representations_that_are_not_finite_stop_the_run():
    encoder = CountingEncoder()
    nn.init.constant_(encoder.scale, float("nan"))
    with pytest.raises(ValueError, match="the model diverged"):
        encode_texts(encoder, tokenize, ["1 2"])


class TopEncoder(CountingEncoder):
    vocabulary_size = VOCABULARY

    def topk(self, tokens: TokenBatch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = self(tokens).sort(dim=1, descending=True, stable=True)
        return values[:, :k], indices[:, :k]


def test_only_the_largest_weights_of_a_text():
    texts = [*random_texts(20, longest=40), "1 3 3 3 5 5 7", "", "4"]
    full = encode_texts(TopEncoder(), tokenize, texts)
    cut = encode_texts(TopEncoder(), tokenize, texts, max_terms=3, bf16=True)
    assert (cut.num_rows, cut.width) == (full.num_rows, VOCABULARY)
    assert (full.row_lengths > 3).any()

    def entries(rows, row):
        span = slice(rows.indptr[row], rows.indptr[row + 1])
        return list(zip(rows.indices[span].tolist(), rows.values[span].tolist(), strict=True))

    for row in range(len(texts)):
        largest = sorted(entries(full, row), key=lambda entry: (-entry[1], entry[0]))[:3]
        assert entries(cut, row) == sorted(largest)
    assert entries(cut, 20) == [(1, 1.0), (3, 3.0), (5, 2.0)]


def test_no_texts():
    with pytest.raises(ValueError, match="no texts to encode"):
        encode_texts(CountingEncoder(), tokenize, [])


def test_progress_is_shown_on_standard_error_only_when_asked_for(capsys):
    encode_texts(CountingEncoder(), tokenize, random_texts(5))
    assert capsys.readouterr() == ("", "")
    encode_texts(CountingEncoder(), tokenize, random_texts(5), progress="toy: documents")
    out, err = capsys.readouterr()
    assert out == ""
    assert "toy: documents" in err
    assert "5/5" in err
