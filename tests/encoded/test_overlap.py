"""Reading, encoding and writing overlap, and whatever fails among them leaves no claim behind."""

import threading
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest

from sparton.encoded import encode_collection, encoding
from sparton.evaluation import load_retriever
from tests.encoded.problems import files, make_texts

NUMBER, ROWS = 50, 16  # texts, and texts of a shard
PATIENCE = 10  # seconds


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory) -> dict[str, bytes]:
    return encode(*load_retriever(model), tmp_path_factory.mktemp("undisturbed") / "docs")


def encode(encoder, tokenizer, output: Path) -> dict[str, bytes]:
    settings = {"rows_per_shard": ROWS, "name": "a model", "progress": False}
    encode_collection(encoder, tokenizer, make_texts(NUMBER), output, **settings)
    return files(output)


def told(function: Callable, number_of: Callable[..., int], over: threading.Event) -> Callable:
    """The function, which tells when it has been called for more texts than a shard has; a lone
    text is that of the plan."""
    texts = 0

    def call(given, *more):
        nonlocal texts
        texts += number_of(given) if number_of(given) > 1 else 0
        if texts > ROWS:
            over.set()
        return function(given, *more)

    return call


def test_a_shard_is_written_while_the_next_is_encoded(model, expected, monkeypatch, tmp_path):
    (encoder, tokenizer), next_one = load_retriever(model), threading.Event()
    number_of = attrgetter("num_sequences")
    monkeypatch.setattr(encoder, "encode", told(encoder.encode, number_of, next_one))
    write = encoding.write_shard

    def patient(*shard):
        assert next_one.wait(PATIENCE)
        write(*shard)

    monkeypatch.setattr(encoding, "write_shard", patient)
    assert encode(encoder, tokenizer, tmp_path / "docs") == expected


def test_the_next_shard_is_read_while_one_is_encoded(model, expected, monkeypatch, tmp_path):
    (encoder, tokenizer), next_one = load_retriever(model), threading.Event()
    monkeypatch.setattr(tokenizer, "documents", told(tokenizer.documents, len, next_one))
    run = encoder.encode

    def patient(tokens, side):
        assert tokens.num_sequences == 1 or next_one.wait(PATIENCE)
        return run(tokens, side)

    monkeypatch.setattr(encoder, "encode", patient)
    assert encode(encoder, tokenizer, tmp_path / "docs") == expected


@pytest.mark.parametrize("where", ["read", "encode", "write"])
def test_what_fails_ends_all_and_the_same_call_goes_on(
    where, model, expected, monkeypatch, tmp_path
):
    (encoder, tokenizer), output = load_retriever(model), tmp_path / "docs"
    place, name = {
        "read": (tokenizer, "documents"),
        "encode": (encoder, "encode"),
        "write": (encoding, "write_shard"),
    }[where]
    work, calls = getattr(place, name), 0

    def failing(*given):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("the third fails")
        return work(*given)

    before = set(threading.enumerate())
    with monkeypatch.context() as patch, pytest.raises(OSError, match="the third fails"):
        patch.setattr(place, name, failing)
        encode(encoder, tokenizer, output)
    assert set(threading.enumerate()) == before, "nothing works on"
    assert not list(output.glob("claims/*"))
    assert len(list(output.glob("shards/*"))) < len(range(0, NUMBER, ROWS))
    assert encode(encoder, tokenizer, output) == expected
