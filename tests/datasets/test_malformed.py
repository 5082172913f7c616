"""Whatever stands in a file, it is read, or refused in one sentence with file and line."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparton.datasets.collection import beir_folder
from sparton.datasets.sources import text_records
from tests.datasets.malformed import DEEP, FORMATS, LONG, lines, outcome, write_texts

EXAMPLES = 40  # of each format, the same in every run


@pytest.mark.parametrize("name", FORMATS)
def test_a_value_or_a_sentence_with_file_and_line(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    write_texts(tmp_path)
    file = tmp_path / form.name

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(lines(form.kind, form.parted), st.sampled_from(["stop", "skip"]))
    def try_one(raw: bytes, on_error: str) -> None:
        form.write(file, form.kind, form.parted, raw)
        came = outcome(form.read, file, on_error)
        assert came in (("value",) if on_error == "skip" and form.skips else ("value", "refused"))

    try_one()


PAIR = '"query": "a", "positive": "b"'
SCORED = '"query": "a", "pos": ["b"], "neg": ["c"]'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f'{{{SCORED}, "scores": [1, 1e39]}}', "1e\\+39 is not finite in fp32"),
        (f'{{{SCORED}, "scores": [[1, 1e308], [1, -1e308]]}}', "1e\\+308 is not finite in fp32"),
        (f'{{{SCORED}, "scores": [1, {10**400}]}}', "an integer of 1329 bits is not"),
        (f'{{{SCORED}, "scores": [1, true]}}', "True is not a number"),
        (f'{{{SCORED}, "scores": [1, "1_0"]}}', "'1_0' is not a number"),
        (f'{{{SCORED}, "scores": [1, "٣"]}}', "is not a number"),
        (f'{{{SCORED}, "scores": {DEEP}}}', "nested too deeply"),
        (DEEP, "nested too deeply"),
        (f'{{{PAIR}, "label": {LONG}}}', "thousands of digits"),
        (f'{{{PAIR}, "label": -{10**400}}}', "do not belong together"),
        ('{"query": "a", "query": "b", "positive": "c"}', "the key 'query' occurs twice"),
        (f'{{{PAIR}, "pos": ["c"]}}', "'positive' and 'pos' are names of the same part"),
        (f'{{{PAIR}, "anchor": "c"}}', "'query' and 'anchor' are names of the same part"),
        (f'{{{PAIR}, "documents": ["c"], "scores": [1]}}', "'positive' and 'documents' are"),
        ('{"query": "a", "documents": ["b"], "scores": [1], "neg": ["c"]}', "leave one of"),
        (f'{{{SCORED}, "scores": [1, 2], "neg_scores": [3]}}', "'scores' and 'neg_scores' are"),
    ],
)  # fmt: skip
def test_what_would_be_read_as_something_else_is_refused(
    line: str, message: str, tmp_path: Path
) -> None:
    """And left out where malformed records are; its neighbour stays."""
    file = tmp_path / "data.jsonl"
    good = json.dumps({"query": "a", "positive": "b", "scores": [3.0]}) if "cores" in line else ""
    file.write_text(f"{good or '{' + PAIR + '}'}\n{line}\n")
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 2: .*{message}") as caught:
        text_records(str(file))
    assert len(str(caught.value)) < 500
    assert len(text_records(str(file), on_error="skip")) == 1


def test_columns_that_are_taken_as_the_same_part_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    pair = {"question": "a", "positive": "b"}
    file.write_text(
        "".join(json.dumps(each) + "\n" for each in [pair] * 20 + [pair | {"query": "c"}])
    )
    with pytest.raises(ValueError, match=r"line 21: \['question', 'query'\] are taken as the same"):
        text_records(str(file))
    file = tmp_path / "data.tsv"
    file.write_text("a\tb\tc\n")
    with pytest.raises(ValueError, match="occurs twice: give each a name"):
        text_records(str(file), columns=["query", "positive", "positive"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"query": "a", "positive": "b"}]\n[]', "line 2: something stands after the list"),
        ('[{"query": "a", "positive": "b"}\n{"query": "a"}]', "line 2: .* a comma or ] is"),
        (DEEP, "line 1: the list is not JSON"),
    ],
)  # fmt: skip
def test_a_list_is_read_to_its_end_or_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(ValueError, match=rf"data\.json, {message}"):
        text_records(str(tmp_path / "data.json"))


@pytest.mark.parametrize("grade", ["1_0", "٣", "true", "1" * 400, LONG, "0.5"])
def test_grades_are_integers_in_plain_digits(grade: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    (tmp_path / "qrels/test.tsv").write_text(f"q0\td0\t1\nq0\td0\t{grade}\n")
    with pytest.raises(ValueError, match=r"test\.tsv, line 2: the grade .* is not an integer"):
        beir_folder(str(tmp_path))


@pytest.mark.parametrize("text", ["[]", "false", "0", "{}"])
def test_a_text_that_is_none_is_not_read_as_empty(text: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    (tmp_path / "corpus.jsonl").write_text(f'{{"_id": "d0", "text": {text}}}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl, line 1: .*must hold text"):
        beir_folder(str(tmp_path))
