"""Texts by row, on disk and in memory."""

import json
from pathlib import Path

import pytest

from sparton.datasets.files import locate
from sparton.datasets.preparation import Reading
from sparton.datasets.texts import TextList, text_table
from sparton.types import TextCollection

TEXTS = {"a": "one", "b": "two", "c": "three"}


def test_tables_and_lists_give_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    lines = [json.dumps({"_id": name, "text": text}) + "\n" for name, text in TEXTS.items()]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    files = locate(str(tmp_path / "texts.jsonl"))
    table = text_table("texts", files, Reading(), str(tmp_path / "cache"))
    for texts in (table, TextList(list(TEXTS.values()), list(TEXTS))):
        assert len(texts) == 3
        assert texts.take([2, 0, 2]) == TextCollection(["c", "a", "c"], ["three", "one", "three"])
        assert texts.take(range(1, 3)) == TextCollection(["b", "c"], ["two", "three"])
        assert texts.take([]) == TextCollection([], [])


def test_texts_in_memory_are_called_by_their_rows_or_all_have_ids() -> None:
    assert TextList(["one", "two"]).take([1]) == TextCollection(["1"], ["two"])
    with pytest.raises(ValueError, match="1 ids for 2 texts: give each text one"):
        TextList(["one", "two"], ["a"])
