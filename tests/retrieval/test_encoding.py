"""Encoding collections: the order, the batches and the modes must not show in the result.

N texts, T tokens, E width of a token's vector.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import nn

from sparton.evaluation import packed_tokenizer
from sparton.kernels.boundaries import sequence_ids
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.heads import EagerHead
from sparton.models.joint import JointHead
from sparton.representations import Representations, TokenVectors
from sparton.retrieval import batches, encoding
from sparton.retrieval.encoding import AUTOCAST, encode_texts, usual_precision
from sparton.retrieval.ordering import in_order
from sparton.types import Forms, Side, TokenBatch

VOCABULARY = 23


class CountingEncoder(nn.Module):
    """Counts each token id; remembers how it was called."""

    kinds: tuple[str, ...] = ("sparse",)
    similarity = "dot"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.batches: list[tuple[int, int]] = []
        self.states: list[tuple[bool, bool, torch.dtype | None]] = []

    def forward(self, tokens: TokenBatch) -> torch.Tensor:
        self.batches.append((tokens.num_sequences, tokens.max_seqlen))
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.states.append((self.training, torch.is_grad_enabled(), autocast))
        owners = sequence_ids(tokens.cu_seqlens, tokens.num_tokens)
        reps = torch.zeros(tokens.num_sequences, VOCABULARY)
        ones = self.scale * torch.ones(tokens.num_tokens)
        return reps.index_put((owners, tokens.input_ids), ones, accumulate=True)

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        return Representations(self(tokens) * (2 if side == "query" else 1))


class VectorEncoder(CountingEncoder):
    """A token's vector is its id and its place; id 5 takes no part. With ``sparse`` counts too."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.kinds = ("sparse", "tokens") if sparse else ("tokens",)

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        ids, places = tokens.input_ids, tokens.position_ids
        values = self.scale * torch.stack((ids, places), dim=1)
        vectors = TokenVectors(values, tokens.cu_seqlens, ids != 5)
        return Representations(self(tokens) if "sparse" in self.kinds else None, vectors)


class NumberTokenizer:
    """Words are token ids; documents have one more token in front, 0."""

    def queries(self, texts: list[str], forms: Forms = None) -> TokenBatch:
        return TokenBatch.from_lists([[int(word) for word in text.split()] for text in texts])

    def documents(self, texts: list[str], forms: Forms = None) -> TokenBatch:
        return self.queries([f"0 {text}" for text in texts])


def encode(
    encoder: nn.Module, texts: list[str], side: Side = "query", **options
) -> Representations:
    return encode_texts(encoder, NumberTokenizer(), texts, side, **options)


def sparse_rows(encoder: nn.Module, texts: list[str], **options) -> SparseVectors:
    encoded = encode(encoder, texts, **options)
    assert encoded.tokens is None
    return encoded.sparse


def random_texts(count: int, longest: int = 12) -> list[str]:
    rng = np.random.default_rng(0)
    return [
        " ".join(map(str, rng.integers(0, VOCABULARY, rng.integers(0, longest))))
        for _ in range(count)
    ]


@pytest.mark.parametrize("batch_tokens", [1, 25, 10_000])
@pytest.mark.parametrize("sequences", [1, 4, 256])
@pytest.mark.parametrize("at_once", [3, 2048])
def test_rows_are_those_of_single_texts_in_order(monkeypatch, batch_tokens, sequences, at_once):
    monkeypatch.setattr(encoding, "_LARGEST_GROUP", at_once)
    monkeypatch.setattr(batches, "_ENTRIES", ({}, sequences * batches._NARROWEST))
    texts, encoder = random_texts(50), CountingEncoder()
    rows = sparse_rows(encoder, texts, batch_tokens=batch_tokens)
    assert (rows.num_vectors, rows.width) == (50, VOCABULARY)
    for row, text in enumerate(texts):
        words, counts = np.unique([int(word) for word in text.split()], return_counts=True)
        span = slice(rows.cu_seqlens[row], rows.cu_seqlens[row + 1])
        np.testing.assert_array_equal(rows.terms[span], words)
        np.testing.assert_array_equal(rows.values[span], 2 * counts)
    for number, longest in encoder.batches:
        assert number <= sequences
        assert number == 1 or number * longest <= batch_tokens
    if batch_tokens == 25 and at_once == 2048 and sequences > 1:
        assert len(encoder.batches) < 30, "texts of like length must share batches"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_encoder_is_in_evaluation_mode_without_gradients(training, precision):
    encoder = CountingEncoder().train(training)
    encode(encoder, ["1 2", "3"], precision=precision)
    assert encoder.training is training
    assert set(encoder.states) == {(False, False, AUTOCAST[precision])}


def test_the_mode_stays_until_the_last_block_that_overlaps_has_ended():
    encoder = CountingEncoder().train()
    first, second = ExitStack(), ExitStack()  # as of two threads
    for block in (first, second):
        # Of what `evaluating` does, gradients would stay off: PyTorch expects blocks to nest.
        block.enter_context(encoding._modes.within(encoder, partial(encoding._evaluate, encoder)))
    first.close()
    assert not encoder.training
    second.close()
    assert encoder.training


@pytest.mark.parametrize("text", ["nonsense", "1 99"])
def test_faults_pass_through_and_leave_the_mode(text):
    encoder = CountingEncoder().train()
    with pytest.raises((ValueError, IndexError)):
        encode(encoder, ["1", text])
    assert encoder.training


def test_representations_that_are_not_finite_stop_the_run():
    encoder = CountingEncoder()
    nn.init.constant_(encoder.scale, float("nan"))
    with pytest.raises(ValueError, match="the model diverged"):
        encode(encoder, ["1 2"])


@pytest.mark.parametrize("batch_tokens", [1, 25, 10_000])
@pytest.mark.parametrize("sparse", [False, True])
def test_token_vectors_are_those_of_single_texts_without_masked_tokens(batch_tokens, sparse):
    texts = random_texts(30)
    encoded = encode(VectorEncoder(sparse), texts, "document", batch_tokens=batch_tokens)
    assert encoded.kinds == ({"sparse", "tokens"} if sparse else {"tokens"})
    vectors = encoded.tokens
    assert vectors.values.dtype == torch.float16
    assert any("5" in text.split() for text in texts)
    for row, text in enumerate(texts):
        expected = [(int(word), place) for place, word in enumerate(f"0 {text}".split())]
        expected = [each for each in expected if each[0] != 5]
        found = vectors.values[vectors.cu_seqlens[row] : vectors.cu_seqlens[row + 1]]
        np.testing.assert_array_equal(found, expected)
    if sparse:
        assert encoded.sparse.num_vectors == len(texts)


@pytest.mark.parametrize("ahead", [1, 2, 100])
@pytest.mark.parametrize("max_terms", [None, 3])
def test_batches_that_are_on_their_way_together_arrive_in_order(monkeypatch, ahead, max_terms):
    """As on a GPU, which is given more work before the host looks at what it was given first."""
    texts = random_texts(40)
    usual = encode(VectorEncoder(True), texts, batch_tokens=30, max_terms=max_terms)
    monkeypatch.setattr(batches, "_AHEAD", {"cpu": ahead})
    found = encode(VectorEncoder(True), texts, batch_tokens=30, max_terms=max_terms)
    for ours, theirs in ((found.sparse, usual.sparse), (found.tokens, usual.tokens)):
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(ours.cu_seqlens, theirs.cu_seqlens)
    assert torch.equal(found.sparse.terms, usual.sparse.terms)
    with pytest.raises(ValueError, match="text 0 of a batch has a token vector"):
        broken = VectorEncoder()
        nn.init.constant_(broken.scale, float("inf"))
        encode(broken, texts, batch_tokens=30)


@pytest.mark.parametrize("most", [1, 7, 40])
def test_parts_are_brought_into_any_order_and_given_up(most):
    encoded = encode(VectorEncoder(True), random_texts(40))
    parts = [encoded.slice(start, min(start + most, 40)) for start in range(0, 40, most)]
    places = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    found = in_order(parts, places.numpy())
    assert parts == []
    expected = encoded.take(places.argsort())
    for ours, theirs in ((found.sparse, expected.sparse), (found.tokens, expected.tokens)):
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(ours.cu_seqlens, theirs.cu_seqlens)
    assert torch.equal(found.sparse.terms, expected.sparse.terms)
    assert not torch.equal(found.sparse.values, encoded.sparse.values)


class OverflowingEncoder(CountingEncoder):
    """Its fp16 does not hold what batches of longer texts give."""

    def forward(self, tokens: TokenBatch) -> torch.Tensor:
        reps = super().forward(tokens)
        large = tokens.max_seqlen > 2 and self.states[-1][2] == torch.float16
        return reps + torch.inf if large else reps


@pytest.mark.parametrize(("precision", "again"), [("fp16", 1), ("bf16", 0), ("fp32", 0)])
def test_a_batch_that_overflows_fp16_is_encoded_in_bf16(precision, again):
    encoder, texts = OverflowingEncoder(), ["1 2 3", "4 5", "6"]
    found = encode(encoder, texts, batch_tokens=3, precision=precision)
    expected = encode(CountingEncoder(), texts, batch_tokens=3)
    assert torch.equal(found.sparse.dense(), expected.sparse.dense())
    dtypes = [AUTOCAST[precision], *[torch.bfloat16] * again]
    assert {state[2] for state in encoder.states} == {*dtypes}
    assert len(encoder.batches) == len({*encoder.batches}) + again


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_what_is_finite_in_no_precision_is_refused(precision):
    encoder = CountingEncoder()
    nn.init.constant_(encoder.scale, float("nan"))
    with pytest.raises(ValueError, match="the model diverged"):
        encode(encoder, ["1", "2"], precision=precision)
    assert len(encoder.batches) == (2 if precision == "fp16" else 1)


def test_a_gpu_encodes_in_16_bits_unless_it_is_told_otherwise(monkeypatch):
    encoder = CountingEncoder()
    assert usual_precision(encoder) == "fp32"
    monkeypatch.setattr(encoding, "device_of", lambda encoder: torch.device("cuda"))
    assert usual_precision(encoder) == "fp16"
    assert usual_precision(encoder.to(torch.bfloat16)) == "bf16"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "head", [EagerHead(), ColbertHead(16), JointHead(EagerHead(), ColbertHead(16))]
)
@pytest.mark.parametrize("max_terms", [None, 3])
def test_a_gpu_gives_what_a_cpu_gives(head, max_terms):
    """Many batches, on their way together."""
    words = [f"w{number}" for number in range(200)]
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(words, rng.integers(1, 40))) for _ in range(500)]
    encoder = build_encoder(tiny(words, hidden_size=64, layers=1), head)
    if "sparse" not in encoder.kinds:
        max_terms = None
    tokenizer = packed_tokenizer(encoder, 32, 64)
    found = [
        encode_texts(
            encoder.to(device), tokenizer, texts, "document", batch_tokens=512,
            precision="fp32", max_terms=max_terms, vector_dtype="float32",
        )
        for device in ("cpu", "cuda")
    ]  # fmt: skip
    if found[0].sparse is not None:
        dense = [each.sparse.dense() for each in found]
        torch.testing.assert_close(*dense, rtol=1e-3, atol=1e-3)
        assert dense[0].any() and not torch.allclose(dense[0].roll(1, 0), dense[1], atol=1e-2)
    if found[0].tokens is not None:
        assert torch.equal(found[0].tokens.cu_seqlens, found[1].tokens.cu_seqlens)
        torch.testing.assert_close(*(each.tokens.values for each in found), rtol=1e-3, atol=1e-3)


def test_only_what_is_asked_for_is_kept_and_what_is_not_given_is_refused():
    texts = ["1 2", "3"]
    assert encode(VectorEncoder(sparse=True), texts, kinds={"sparse"}).kinds == {"sparse"}
    assert encode(VectorEncoder(sparse=True), texts, kinds={"tokens"}).kinds == {"tokens"}
    with pytest.raises(ValueError, match="VectorEncoder gives no sparse vectors"):
        encode(VectorEncoder(), texts, "document", kinds={"sparse", "tokens"})
    with pytest.raises(ValueError, match="CountingEncoder gives no token vectors"):
        encode(CountingEncoder(), texts, kinds={"tokens"})
    with pytest.raises(ValueError, match="max_query_terms=3 keeps a text's largest weights, but"):
        encode(VectorEncoder(), texts, max_terms=3)


@pytest.mark.parametrize(
    ("scale", "dtype", "message"),
    [
        (float("nan"), "float16", "component nan: the model diverged"),
        (float("nan"), "float32", "component nan: the model diverged"),
        (1e6, "float16", r"component 2e\+06: float16 cannot hold it; store float32"),
    ],
)
def test_token_vectors_that_cannot_be_stored_stop_the_run(scale, dtype, message):
    encoder = VectorEncoder()
    nn.init.constant_(encoder.scale, scale)
    with pytest.raises(ValueError, match=f"text 1 of a batch has a token vector .*{message}"):
        encode(encoder, ["5 5 5", "2 1", "1"], vector_dtype=dtype)
    nn.init.constant_(encoder.scale, 1e6)
    assert encode(encoder, ["2"], vector_dtype="float32").tokens.values.tolist() == [[2e6, 0]]


class TopEncoder(CountingEncoder):
    vocabulary_size = VOCABULARY
    tops = 0

    def topk(self, tokens: TokenBatch, side: Side, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.tops += 1
        values, indices = self(tokens).sort(dim=1, descending=True, stable=True)
        return 2 * values[:, :k], indices[:, :k]


@pytest.mark.parametrize("kinds", [None, {"sparse"}])
@pytest.mark.parametrize("build", [TopEncoder, CountingEncoder, lambda: VectorEncoder(True)])
def test_only_the_largest_weights_of_a_text(kinds, build):
    texts, encoder = [*random_texts(20, longest=40), "1 3 3 3 5 5 7", "", "4"], build()
    full = encode(encoder, texts).sparse
    cut = encode(encoder, texts, max_terms=3, precision="bf16", kinds=kinds).sparse
    assert (cut.num_vectors, cut.width) == (full.num_vectors, VOCABULARY)
    assert (full.lengths > 3).any()

    def entries(rows, row):
        span = slice(rows.cu_seqlens[row], rows.cu_seqlens[row + 1])
        return list(zip(rows.terms[span].tolist(), rows.values[span].tolist(), strict=True))

    for row in range(len(texts)):
        largest = sorted(entries(full, row), key=lambda entry: (-entry[1], entry[0]))[:3]
        assert entries(cut, row) == sorted(largest)
    assert [term for term, _ in entries(cut, 20)] == [1, 3, 5]
    if isinstance(encoder, TopEncoder):
        assert encoder.tops > 0, "no dense representations then"


def column(texts: list[str]) -> Any:
    return datasets.Dataset.from_dict({"text": texts})["text"]


@pytest.mark.parametrize("hold", [tuple, np.array, column])
def test_texts_in_other_containers(hold):
    texts = random_texts(9)
    expected, found = (sparse_rows(CountingEncoder(), x) for x in (texts, hold(texts)))
    for each, right in zip(found[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(each, right)


def test_no_texts():
    for nothing in ([], np.array([], str)):
        with pytest.raises(ValueError, match="no texts to encode"):
            encode(CountingEncoder(), nothing)


def test_a_lone_text_is_no_list_of_its_letters():
    with pytest.raises(ValueError, match="texts is the single text '1 2': put it into a list"):
        encode(CountingEncoder(), "1 2")


def test_a_side_that_does_not_exist():
    """It would have been taken for documents."""
    with pytest.raises(ValueError, match="side='queries' must be query or document"):
        encode(CountingEncoder(), ["1 2"], "queries")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # It would have become the zeros of a dtype that PyTorch knows.
        ({"vector_dtype": "int8"}, "vector_dtype='int8' must be float16, bfloat16, float32"),
        ({"batch_tokens": 0}, "batch_tokens=0 must be a whole number of at least 1"),
        ({"kinds": []}, "kinds is empty: name tokens, or leave it out"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        encode(VectorEncoder(), ["1 2"], "document", **settings)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_texts_of_which_none_has_anything(number):
    """An array of no rows has strides of its own."""
    nothing = TokenVectors(torch.zeros(0, 3), torch.zeros(number + 1, dtype=torch.int64))
    parts = [Representations(SparseVectors.from_dense(torch.zeros(number, 4)), nothing)]
    found = in_order(parts, np.arange(number)[::-1].copy())
    assert found.sparse.dense().tolist() == [[0.0] * 4] * number
    assert found.tokens.lengths.tolist() == [0] * number


@pytest.mark.parametrize("build", [TopEncoder, CountingEncoder])
@pytest.mark.parametrize("most", [0, -1])
def test_no_weights_of_a_text(build, most):
    with pytest.raises(ValueError, match=f"max_terms={most} must be a whole number of at least 1"):
        encode(build(), ["1 2 3"], max_terms=most)


def test_progress_is_shown_on_standard_error_only_when_asked_for(capsys):
    encode(CountingEncoder(), random_texts(5))
    assert capsys.readouterr() == ("", "")
    encode(CountingEncoder(), random_texts(5), progress="toy: documents")
    out, err = capsys.readouterr()
    assert out == ""
    assert "toy: documents" in err
    assert "5/5" in err
