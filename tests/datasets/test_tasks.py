"""Tasks that a user names in one line: folders, ids of ir_datasets, TREC files."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sparton.datasets.tasks import beir_folders, ir_datasets_tasks, trec_files, trec_task
from tests.datasets.test_downloads import registered  # noqa: F401, a fixture

Write = Callable[..., str]
RECORDS = [{"_id": f"d{n}", "text": f"text {n}"} for n in range(3)]
QUERIES = [{"_id": "q1", "text": "one"}, {"_id": "q2", "text": "two"}]


@pytest.fixture
def folders(write_beir: Write, tmp_path: Path) -> list[str]:
    """The second has no dev split."""
    made = write_beir(RECORDS, QUERIES, ["q1\td0\t1"])
    paths = [tmp_path / "a" / "first", tmp_path / "a" / "second", tmp_path / "b" / "first"]
    for path in paths:
        shutil.copytree(made, path)
    for path in (paths[0], paths[2]):
        (path / "qrels" / "dev.tsv").write_text("q2\td1\t2\n")
    return [str(path) for path in paths]


def test_several_folders_go_by_their_names(folders: list[str]) -> None:
    builders = beir_folders(folders[:2], exclude_self=True)
    tasks = {name: build() for name, build in builders.items()}
    assert [task.qrels for task in tasks.values()] == [{"q1": {"d0": 1}}] * 2
    assert list(tasks) == ["first", "second"]
    assert tasks["first"].exclude_self
    assert list(beir_folders(folders)) == [folders[0], "second", folders[2]]
    assert list(beir_folders([f"{folders[0]}.zip", f"{folders[0]}/../second"])) == [
        "first",
        "second",
    ]


def test_folders_without_a_split_can_be_left_out(folders: list[str]) -> None:
    assert list(beir_folders(folders[:2], "dev", missing="skip")) == ["first"]
    assert beir_folders([folders[1]], "dev", missing="skip") == {}
    with pytest.raises(FileNotFoundError, match=r"second/qrels/dev\.tsv"):
        beir_folders(folders[:2], "dev")["second"]()


@pytest.mark.parametrize("paths", [[], [None], "folder"])
def test_no_folders_are_refused(paths: list[str]) -> None:
    with pytest.raises(ValueError, match=r"paths=.*: name folders in the layout of BEIR"):
        beir_folders(paths)


def test_a_folder_that_is_there_twice_is_refused(folders: list[str]) -> None:
    with pytest.raises(ValueError, match="first is there twice"):
        beir_folders([folders[0], folders[0]])
    with pytest.raises(ValueError, match="missing='maybe' must be"):
        beir_folders(folders, missing="maybe")  # type: ignore[arg-type]


def test_ids_of_ir_datasets(registered: str) -> None:  # noqa: F811
    (build,) = ir_datasets_tasks([registered]).values()
    assert build().qrels == {"q1": {"d1": 2, "d2": 0}} and not build().exclude_self
    assert ir_datasets_tasks([registered], exclude_self=True)[registered]().exclude_self
    told = ir_datasets_tasks(["beir/arguana", "beir/quora/dev", "beir/scifact/test"])
    assert [build.keywords["exclude_self"] for build in told.values()] == [True, True, False]
    assert ir_datasets_tasks([None], missing="skip") == {}
    for nothing in ([], [None], "beir/scifact"):
        with pytest.raises(ValueError, match=r"datasets=.*: name collections of ir_datasets"):
            ir_datasets_tasks(nothing)


@pytest.mark.parametrize("form", ["tsv", "tsv with a header", "csv", "jsonl", "parts"])
def test_trec_files_of_every_format(write_lines: Write, tmp_path: Path, form: str) -> None:
    rows = [(record["_id"], record["text"]) for record in RECORDS]
    if form == "csv":
        lines = ["docno,contents", *(f'{name},"{text}"' for name, text in rows)]
        documents: str | list[str] = write_lines(lines, "documents.csv")
    elif form == "jsonl":
        documents = write_lines([json.dumps(record) for record in RECORDS], "documents.jsonl")
    else:
        lines = ["\t".join(row) for row in rows]
        lines = ["id\ttext", *lines] if "header" in form else lines
        documents = write_lines(lines, "documents.tsv")
    if form == "parts":
        documents = [write_lines(lines[:2], "a.tsv"), write_lines(lines[2:], "b.tsv")]
    queries = write_lines(["q1\tone", "q2\ttwo"], "queries.tsv")
    (tmp_path / "covid.qrels.gz").write_bytes(gzip.compress(b"q2 0 d0 2\nq2 0 d2 0\n"))
    task = trec_task(documents, queries, str(tmp_path / "covid.qrels.gz"))
    assert task.name == "covid" and task.qrels == {"q2": {"d0": 2, "d2": 0}}
    assert dict(zip(*task.documents)) == dict(rows)
    assert dict(zip(*task.queries)) == {"q2": "two"}


def test_judgments_are_one_file(write_lines: Write) -> None:
    texts = write_lines(["d1\tone"], "documents.tsv")
    for name in ("a.qrels", "b.qrels"):
        qrels = write_lines(["d1 0 d1 1"], name)
    pattern = str(Path(qrels).with_name("*.qrels"))
    with pytest.raises(ValueError, match=r"qrels=.*\*\.qrels fits .*a\.qrels and 1 more: name the"):
        trec_task(texts, texts, pattern)


def test_trec_files_whose_columns_are_renamed(write_lines: Write) -> None:
    documents = write_lines(["nummer\tinhalt", "d1\tone", "d2\ttwo"], "documents.tsv")
    qrels = write_lines(["d1 0 d2 1"], "qrels.txt")
    columns = {"nummer": "_id", "inhalt": "text"}
    task = trec_task(documents, documents, qrels, columns=columns)
    assert dict(zip(*task.documents)) == {"d1": "one", "d2": "two"}


@pytest.mark.parametrize(
    ("documents", "qrels", "message"),
    [
        (
            ["d1\tone", "d2"],
            ["q1 0 d1 1"],
            r"documents\.tsv, line 2: an id and a text are expec",
        ),
        (["d1\tone", "d1\ttwo"], ["q1 0 d1 1"], r"documents\.tsv, line 2: the id 'd1' occurs a s"),
        (["d1\tone"], ["q1 0 d9 1"], r"qrels\.txt, line 1: document 'd9' is judged but not among"),
        (["d1\tone"], ["q1 0 d1"], r"qrels\.txt, line 1: the grade 'd1' is not an integer"),
        (
            ["d1\tone"],
            ["q1 0 d1 1", "q1 d1 1"],
            r"qrels\.txt, line 2: the lines before have 4 columns, and this has \['q1', 'd1'",
        ),
        (["d1\tone"], ["q1 d1 1", "q1 0 d1 1"], r"qrels\.txt, line 2: the lines before have 3 col"),
        (
            ["id\ttext", "d1\tone\ttwo"],
            ["q1 0 d1 1"],
            r"line 2: 2 tab-separated fields expected, not 3: .* a text of TSV has no tab",
        ),
    ],
)
def test_faults_of_trec_files_have_a_line(
    write_lines: Write, documents: list[str], qrels: list[str], message: str
) -> None:
    files = [
        write_lines(documents, "documents.tsv"),
        write_lines(["q1\tone"], "queries.tsv"),
        write_lines(qrels, "qrels.txt"),
    ]
    with pytest.raises(ValueError, match=message):
        trec_task(*files)


def test_judgments_that_are_not_named(write_lines: Write) -> None:
    assert trec_files("documents", "queries", None, missing="skip") == {}
    with pytest.raises(ValueError, match="qrels=None: name the file"):
        trec_files("documents", "queries", None)
    qrels = write_lines(["q 0 d 1"], "dev.txt")
    assert list(trec_files("documents", "queries", qrels)) == ["dev"]
