"""Commands name their own settings in what they refuse, not those of a training."""

import pytest

from sparton.arguments import ArgumentError
from sparton.cli.commands.search import _as_flag
from sparton.cli.errors import explain, settings_named


def test_arguments_are_told_as_the_settings_of_this_command():
    error = ArgumentError("{on_error:name} or {query_length}", on_error="skip", query_length=9)
    assert explain(error) == "data.on_error or query_length=9"
    with pytest.raises(ValueError) as told, settings_named(query_length="length"):
        raise error
    assert str(told.value) == "on_error or length=9"


def test_settings_of_a_search_are_its_flags():
    words = ["index=docs", "query=a=b", "on_error=skip", "docs", "k", "other=1", "--k=3"]
    assert [_as_flag(word) for word in words] == [
        "docs", "--query=a=b", "--on-error=skip", "docs", "k", "other=1", "--k=3",
    ]  # fmt: skip
