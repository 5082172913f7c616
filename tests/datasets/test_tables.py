"""Own files with any column names, in every format; what is wrong with them, and where."""

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparton.arguments import ArgumentError
from sparton.datasets.files import DataFile
from sparton.datasets.lookup import Records
from sparton.datasets.mixture import text_mixture
from sparton.datasets.preparation import Reading
from sparton.datasets.sources import text_records
from sparton.datasets.texts import text_table
from sparton.types import Example

Write = Callable[..., str]
ROWS = [
    ["how is rice cooked", 'In water, or in "milk"\nfor a pudding.'],
    ["why is the sky blue", "Blue light is scattered, naïvely said."],
]
EXAMPLES = [Example(*row) for row in ROWS]


def all_examples(source: Records, num_negatives: int = 0) -> list[Example]:
    return [source.example(index, 0, num_negatives) for index in range(len(source))]


def csv_text(rows: list[list[str]], delimiter: str = ",", end: str = "\n") -> str:
    cells = [['"{}"'.format(cell.replace('"', '""')) for cell in row] for row in rows]
    return end.join(delimiter.join(row) for row in cells) + end


@pytest.mark.parametrize("header", [["question", "passage"], ["Frage", "Antwort"], ["", "q", "p"]])
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_csv_with_any_header(tmp_path: Path, header: list[str], delimiter: str) -> None:
    rows = [[str(number), *row][-len(header) :] for number, row in enumerate(ROWS)]
    text = "\ufeff" + csv_text([header, *rows], delimiter, "\r\n")
    (tmp_path / "mine.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert all_examples(text_records("mine.csv.gz", root=str(tmp_path))) == EXAMPLES


def test_csv_that_people_and_spreadsheets_write(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text('question , passage\nhow is rice cooked, "In water, or milk."\n')
    assert all_examples(text_records(str(path))) == [
        Example("how is rice cooked", "In water, or milk.")
    ]
    path.write_text("question,passage,,\nrice,food,,\n")  # columns without content
    assert all_examples(text_records(str(path))) == [Example("rice", "food")]
    path.write_text("rice, food\nsky, weather\n")  # nobody can tell, as without the spaces
    told = text_records(str(path), columns=["query", "positive"])
    assert all_examples(told) == [Example("rice", "food"), Example("sky", "weather")]
    path.write_text("question,passage,passage\nrice,food,grain\n")
    with pytest.raises(ValueError, match=r"'passage', 'passage'\] occurs twice: give each a name"):
        text_records(str(path))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("question,passage\nq,naïve\n".encode("utf-16"), "line 1: .*utf-16, .* iconv -f utf-16 "),
        ("question,passage\nq,naïve\n".encode("latin1"), "line 2: .*latin1, .* iconv -f latin1 "),
        (b"question,passage\rq,p\r", "line 1: .*lines end in a line feed"),
    ],
)
def test_files_of_other_systems_are_named(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=told):
        text_records(str(path))


def test_csv_without_a_header_where_that_is_evident_or_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "mine.csv"
    path.write_text(csv_text(ROWS))
    assert all_examples(text_records(str(path))) == EXAMPLES
    assert "no header, its first record is: how is rice cooked | In water" in caplog.text
    assert "mine.csv: 2 records (in order: query, positive)" in caplog.text
    path.write_text("rice,food\nsky,weather\n")
    told = text_records(str(path), columns=["query", "positive"])
    assert all_examples(told) == [Example("rice", "food"), Example("sky", "weather")]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_column_of_addresses_is_no_negative(tmp_path: Path, form: str) -> None:
    rows = [(f"how is it {n}", f"so it is {n}", f"https://a.org/{n}") for n in range(2)]
    path = tmp_path / f"mine.{form}"
    if form == "csv":
        path.write_text(csv_text([("frage", "antwort", "quelle"), *rows], ",", "\n"))
    else:
        named = (dict(zip(("frage", "antwort", "quelle"), row)) for row in rows)
        path.write_text("".join(json.dumps(record) + "\n" for record in named))
    assert all_examples(text_records(str(path)), 1) == [Example(*row[:2]) for row in rows]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_record_without_its_parts_is_told_by_its_own_keys(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"mine.{form}"

    def write(names: list[str]) -> None:
        cells = ["d1", "a title", "3"]
        lines = csv_text([names, cells]) if form == "csv" else json.dumps(dict(zip(names, cells)))
        path.write_text(lines)

    write(["docno", "headline", "num"])
    with pytest.raises(ValueError, match=r"expected, found \['docno', 'headline', 'num'\]"):
        text_table("mine", [DataFile(str(path), path)], Reading())
    write(["id", "Question", "score"])
    with pytest.raises(ValueError, match=r"the keys \['id', 'Question', 'score'\] lack a query"):
        text_records(str(path))


def test_a_short_text_on_the_first_line_is_no_header(tmp_path: Path) -> None:
    path = tmp_path / "queries.tsv"
    path.write_text("q1\tdefine extreme\nq2\thow is rice cooked\nq3\twhy is the sky blue\n")
    table = text_table("queries", [DataFile(str(path), path)], Reading())
    assert table.take(range(len(table))).ids == ["q1", "q2", "q3"]


def test_csv_may_begin_with_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("\n \nquestion;passage\nhow is it;so it is\nwhat\n")
    with pytest.raises(ValueError, match=r"mine\.csv, line 5: 2 fields expected, not 1"):
        text_records(str(path))
    source = text_records(str(path), on_error="skip")
    assert all_examples(source) == [Example("how is it", "so it is")]


def test_keys_that_only_later_records_have_go_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    records = [{"question": f"q{n}", "passage": f"p{n}", "note": "x"} for n in range(30)]
    later = {"question": "q", "passage": "p", "hard_negatives": ["n"], "source": "y"}
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, later]))
    examples = all_examples(text_records(str(path)), 1)
    assert examples[-1] == Example("q", "p", ("n",)) and not examples[0].negatives


def test_columns_may_name_a_set(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"gruppe": ["rice", "how is rice cooked"]}\n')
    (example,) = all_examples(text_records(str(path), columns={"gruppe": "set"}))
    assert {example.query, example.positive} == {"rice", "how is rice cooked"}


def test_what_columns_are_taken_as_is_said_every_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "mine.csv"
    path.write_text("id,question,passage,bad,url\n1,how is it,so it is,not so it is,x\n")
    for _ in range(2):  # the second time, the table comes from the cache
        caplog.clear()
        text_records(str(path), name="mine")
        said = "mine: 1 records (question as query, passage as positive; not used: 'id', 'bad', 'u"
        assert said in caplog.text
    renamed = text_records(str(path), columns={"bad": "negative"})
    assert all_examples(renamed, 1) == [Example("how is it", "so it is", ("not so it is",))]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"frgae": "query", "antwort": "positive"},
            "columns renames 'frgae', which is none of",
        ),
        (
            {"frage": "query", "antwort": "pasitive"},
            "columns takes 'antwort' as 'pasitive'",
        ),
    ],
)
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_columns_that_there_are_not_are_refused(tmp_path, form, columns, message):
    path = tmp_path / f"mine.{form}"
    if form == "csv":
        path.write_text("note,frage,antwort\nshort,how is it,so it is\n")
    else:
        path.write_text('{"note": "short", "frage": "how is it", "antwort": "so it is"}\n')
    with pytest.raises(ValueError, match=message):
        text_records(str(path), columns=columns)
    (example,) = all_examples(
        text_records(str(path), columns={"frage": "query", "antwort": "positive"}), 1
    )
    assert example == Example("how is it", "so it is")


def test_commas_in_a_file_of_tabs_are_told(tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt"
    path.write_text("query,positive\nhow is it,so it is\nand what,nothing\n")
    with pytest.raises(ArgumentError, match=r"pairs\.txt has no tab .*: format='csv' if commas"):
        text_records(str(path))
    assert len(text_records(str(path), format="csv")) == 2
    path.write_text("how is it\tso it is, now\n")
    assert len(text_records(str(path))) == 1


def test_empty_cells_of_negatives_are_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("anchor,positive,negative_1,negative_2\nq,p,n,\nr,s,,\n")
    source = text_records(str(path))
    assert all_examples(source, 0) == [Example("q", "p"), Example("r", "s")]
    assert source.example(0, 0, 1).negatives == ("n",)
    assert source.without_negatives == 1 and source.example(1, 0, 1).negatives == ()
    assert source.table.facts["first_without_negatives"] == f"{path}, line 3"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('"a"b,c', r"not CSV: .* \(a quote within quotes is written twice\)"),
        ("a,b,c", "2 fields expected, not 3: "),
        (",b", "'query' holds an empty text"),
    ],
)
def test_faults_of_csv_have_a_line(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f'question,passage\nq,"two\nlines"\n{line}\nr,s\n')
    with pytest.raises(ValueError, match=rf"mine\.csv, line 4: {fault}"):
        text_records(str(path))
    kept = text_records(str(path), on_error="skip")
    assert all_examples(kept) == [Example("q", "two\nlines"), Example("r", "s")]


def test_a_quote_that_does_not_end_and_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text('question,passage\nq,p\nr,"s\nt,u\n')
    with pytest.raises(ValueError, match=r"mine\.csv, line 3: not CSV: unexpected end of data"):
        text_records(str(path))
    path.write_bytes(b"question,passage\nq,caf\xe9\n")
    with pytest.raises(ValueError, match=r"mine\.csv, line 2: not UTF-8 text: byte 0xe9"):
        text_records(str(path))


def test_a_text_longer_than_a_field_may_be_by_default(tmp_path: Path) -> None:
    long = "word " * 40_000
    (tmp_path / "mine.csv").write_text(f"question,passage\nq,{long}\n")
    assert text_records("mine.csv", root=str(tmp_path)).example(0, 0, 0).positive == long


@pytest.mark.parametrize("names", [("question", "passage"), ("frage", "antwort")])
def test_json_lines_lists_and_parquet_with_other_names(tmp_path: Path, names: tuple) -> None:
    records = [dict(zip(("nr", *names), (number, *row))) for number, row in enumerate(ROWS)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (tmp_path / "b.json").write_text(json.dumps(records))
    (tmp_path / "c.json").write_text("\n" + json.dumps(records, indent=2))
    (tmp_path / "d.json").write_text(json.dumps(ROWS))
    # The order of an object's keys says nothing: the first record's holds for all.
    turned = [records[0], dict(reversed(records[1].items()))]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(each) + "\n" for each in turned))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "f.parquet")
    for path in sorted(tmp_path.glob("?.*")):
        assert all_examples(text_records(str(path))) == EXAMPLES, path.name


def test_faults_of_a_json_list_have_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        '[\n  {"question": "q", "passage": "p"},\n  {"question": "q"},\n  ["r", "s"]\n]'
    )
    with pytest.raises(ValueError, match=r"a\.json, line 3: the keys \['question'\] lack a q"):
        text_records(str(path))
    assert len(text_records(str(path), on_error="skip")) == 2
    path.write_text('[\n  ["q", "p"],\n  ["r" "s"]\n]')
    with pytest.raises(ValueError, match=r"a\.json, line 3: the list is not JSON: .*line 3"):
        text_records(str(path), on_error="skip")


def test_pairs_that_are_labelled_as_wrong_are_no_pairs(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text("question\tpassage\tlabel\nq\tp\t1\nq\tn\t0\n")
    with pytest.raises(ValueError, match=r"mine\.tsv, line 3: its label is 0, which says"):
        text_records(str(path))
    assert all_examples(text_records(str(path), on_error="skip")) == [Example("q", "p")]


def test_files_of_a_command_line(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.csv").write_text(f"question,passage\n{name},text\n")
    one, both = (
        str(tmp_path / "one.csv"),
        [str(tmp_path / f"{name}.csv") for name in ("one", "two")],
    )
    assert list(text_mixture(one).sources) == ["one"]
    assert {name: len(each) for name, each in text_mixture(both).sources.items()} == {"files": 2}
    assert list(text_mixture(str(tmp_path / "*.csv")).sources) == ["files"]
    with pytest.raises(ValueError, match="name a file"):
        text_mixture([])


def test_a_collection_of_other_names(tmp_path: Path) -> None:
    path = tmp_path / "documents.csv"
    path.write_text('docno,headline,contents\nd1,Title,"one, two"\nd2,,three\n')
    table = text_table("mine", [DataFile(str(path), path)], Reading())
    assert [table.text(row) for row in table.find(["d2", "d1"])] == ["three", "Title one, two"]
