"""Errors that name arguments: the library's words, and those of a command."""

import pickle

import pytest

from sparton.arguments import ArgumentError, refuse_below, refuse_ignored, refuse_other
from sparton.cli.commands.flags import flags_named

WORDS = ArgumentError(
    "{}: {depth} leaves nothing: raise {depth:name}, or take {short} or {over_all}",
    "file {x}",
    depth=3,
    short="keep",
    over_all=True,
)


def test_a_sentence_in_the_words_of_python_and_of_flags():
    assert str(WORDS) == (
        "file {x}: depth=3 leaves nothing: raise depth, or take short='keep' or over_all=True"
    )
    with pytest.raises(ValueError, match="--all") as caught, flags_named(over_all="--all"):
        raise WORDS
    assert str(caught.value) == (
        "file {x}: --depth 3 leaves nothing: raise --depth, or take --short keep or --all"
    )
    overrides = WORDS.told(lambda name: f"data.{name}", lambda name, value: f"data.{name}={value}")
    assert "raise data.depth, or take data.short=keep" in overrides


def test_only_what_names_arguments_is_told_anew():
    error = ValueError("depth=3")
    with pytest.raises(ValueError, match="depth=3") as caught, flags_named():
        raise error
    assert caught.value is error


def test_an_error_passes_from_process_to_process():
    assert str(pickle.loads(pickle.dumps(WORDS))) == str(WORDS)


def test_other_values_than_a_few_are_refused():
    refuse_other(("keep", "drop"), short="keep", long="drop")
    with pytest.raises(ArgumentError, match=r"^long='cut' must be keep or drop$"):
        refuse_other(("keep", "drop"), short="keep", long="cut")
    with pytest.raises(ArgumentError, match=r"^nbits=3 must be 1, 2 or 4$"):
        refuse_other((1, 2, 4), nbits=3)


def test_numbers_below_a_bound_and_ignored_arguments_are_refused():
    refuse_below(1, steps=1, limit=None)
    with pytest.raises(ValueError, match=r"^limit=0 must be at least 1$"):
        refuse_below(1, steps=1, limit=0)
    refuse_ignored("bm25", length=None)
    with pytest.raises(ValueError, match=r"^bm25 ignores length, terms: leave that out$"):
        refuse_ignored("bm25", length=0, other=None, terms=4)
