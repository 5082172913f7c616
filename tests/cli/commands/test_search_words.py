"""Which words of ``sparton search`` are settings."""

import pytest

from sparton.cli.commands.flags import reading_of
from sparton.cli.commands.search import _as_flags, _parser, main


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["index=DOCS", "query=a b", "k=3"], ["DOCS", "--query=a b", "--k=3"]),
        (["DOCS", "--query", "k=5 kato"], ["DOCS", "--query", "k=5 kato"]),
        (["DOCS", "--query", "index=kato 5"], ["DOCS", "--query", "index=kato 5"]),
        (["--query=x", "k=5", "DOCS"], ["--query=x", "--k=5", "DOCS"]),
        (["--query", "x", "--", "k=DOCS"], ["--query", "x", "--", "k=DOCS"]),
    ],
)
def test_what_follows_a_flag_is_its_value(words, found):
    assert _as_flags(words) == found


def test_columns_rename_all_or_none():
    docs = ["DOCS", "--queries", "q.tsv", "--columns"]
    read = [reading_of(_parser().parse_args([*docs, *columns])) for columns in (["a"], ["a=b"])]
    assert [each["columns"] for each in read] == [["a"], {"a": "b"}]
    assert [each["on_error"] for each in read] == ["stop", "stop"]
    with pytest.raises(ValueError, match="all of them rename, as id=_id does, or none"):
        reading_of(_parser().parse_args([*docs, "id=_id", "text"]))


def test_a_search_without_files_ignores_no_flag():
    with pytest.raises(ValueError, match="ignores --on-error: leave that out"):
        main(["DOCS", "--query", "x", "--on-error", "skip"])
