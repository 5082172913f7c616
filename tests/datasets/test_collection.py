"""BEIR folders and zip files to tasks; every fault is named where it stands."""

import gzip
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import pytest

from sparton.cli.collections import text_files
from sparton.datasets.collection import beir_folder, beir_texts, has_judgments

DATA = Path(os.environ.get("SPARTON_DATA", Path(__file__).resolve().parents[2] / "../shared/data"))
DOCUMENTS = [
    {"_id": "d1", "title": "A title", "text": "and a body"},
    {"_id": "d2", "title": "", "text": "only a body"},
    {"_id": "d3", "title": "", "text": ""},
]
QUERIES = [{"_id": name, "text": f"query {name}"} for name in ("q1", "q2", "q3")]
QRELS = ["q2\td1\t2", "q2\td3\t0", "q1\td2\t1"]

WriteBeir = Callable[..., str]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_reads_a_folder(
    write_beir: WriteBeir, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_beir(DOCUMENTS, QUERIES, QRELS, ending=ending)
    with caplog.at_level(logging.WARNING):
        task = beir_folder(folder, exclude_self=True)
    assert task.name == "beir/test" and task.exclude_self
    assert list(task.documents.ids) == ["d1", "d2", "d3"]
    assert list(task.documents.texts) == ["A title and a body", "only a body", ""]
    assert (list(task.queries.ids), list(task.queries.texts)) == (
        ["q1", "q2"],
        ["query q1", "query q2"],
    )
    assert task.qrels == {"q1": {"d2": 1}, "q2": {"d1": 2, "d3": 0}}
    assert "1 of 3 documents are empty; kept" in caplog.text


def test_judgments_may_lie_elsewhere_be_gzipped_or_in_trec_format(
    write_beir: WriteBeir, tmp_path: Path
) -> None:
    folder = write_beir(DOCUMENTS, QUERIES, QRELS)
    other = tmp_path / "judged.gz"
    other.write_bytes(gzip.compress(b"q3 0 d1 3\nq3 0 d2 -1\n"))
    task = beir_folder(folder, qrels=str(other), name="other")
    assert (task.name, task.qrels) == ("other", {"q3": {"d1": 3, "d2": -1}})


FAULTS: dict[str, tuple[list[Any], list[Any], list[str], str]] = {
    "unknown document": (DOCUMENTS, QUERIES, ["q1\td9\t1"], r"test\.tsv, line 2: document 'd9'"),
    "unknown query": (DOCUMENTS, QUERIES, [*QRELS, "q9\td1\t1"], "line 5: query 'q9' is judged"),
    "document twice": ([*DOCUMENTS, DOCUMENTS[0]], QUERIES, QRELS, r"jsonl, line 4: the id 'd1'"),
    "query twice": (DOCUMENTS, [*QUERIES, QUERIES[1]], QRELS, r"queries\.jsonl, line 4: the id"),
    "no id": ([{"id_": "d1", "text": "x"}], QUERIES, QRELS, r"corpus\.jsonl, line 1: an object"),
    "no text": (DOCUMENTS, [{"_id": "q1"}], QRELS, r"queries\.jsonl, line 1: an object"),
    "contradiction": (DOCUMENTS, QUERIES, [*QRELS, "q1\td2\t0"], "line 5: .*judged 1 before and 0"),
    "broken grade": (DOCUMENTS, QUERIES, ["q1\td2\thigh"], "line 2: the grade 'high' is not an"),
    "document id with white space": (
        [*DOCUMENTS, {"_id": "d 4", "text": "x"}],
        QUERIES,
        QRELS,
        r"corpus\.jsonl, line 4: the id 'd 4' holds white space, .*: rename it there",
    ),
    "query id with white space": (
        DOCUMENTS,
        [*QUERIES, {"_id": "q4\u00a0", "text": "x"}],
        QRELS,
        r"queries\.jsonl, line 4: the id 'q4\\xa0' holds white space",
    ),
    "columns": (DOCUMENTS, QUERIES, ["q1\td2"], "line 2: query id, document id and grade"),
    "nothing judged": (DOCUMENTS, QUERIES, [], "beir/test: no judgment is left"),
    "nothing relevant": (
        DOCUMENTS,
        QUERIES,
        ["q1\td1\t0", "q2\td1\t-1"],
        "beir/test: no judgment has a grade of 1 or more, so that no document is relevant",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(write_beir: WriteBeir, fault: str) -> None:
    documents, queries, qrels, message = FAULTS[fault]
    folder = write_beir(documents, queries, qrels)
    with pytest.raises(ValueError, match=message):
        beir_folder(folder)


HEADERS = ["query-id\tcorpus-id\tscore", "query_id doc-id relevance", "QID\tDocID\tlabel", ""]


@pytest.mark.parametrize(
    "header", [*HEADERS, "query-id\tQ0\tcorpus-id\tscore", "\nquery-id\tcorpus-id\tscore"]
)
def test_known_headers_are_no_judgments(write_beir: WriteBeir, header: str) -> None:
    folder = Path(write_beir(DOCUMENTS, QUERIES, QRELS))
    (folder / "qrels" / "test.tsv").write_text("\n".join([header, *QRELS]) + "\n")
    assert beir_folder(str(folder)).qrels == {"q1": {"d2": 1}, "q2": {"d1": 2, "d3": 0}}


@pytest.mark.parametrize("line", ["q1\td1\thigh", "q1\td1\t1.0", "query-id\td1\tscore"])
def test_a_malformed_first_judgment_is_no_header(write_beir: WriteBeir, line: str) -> None:
    folder = Path(write_beir(DOCUMENTS, QUERIES, QRELS))
    (folder / "qrels" / "test.tsv").write_text("\n".join([line, *QRELS]) + "\n")
    with pytest.raises(ValueError, match=r"test\.tsv, line 1: the grade '.*' is not an integer"):
        beir_folder(str(folder))


def test_queries_without_a_relevant_document_are_counted(
    write_beir: WriteBeir, caplog: pytest.LogCaptureFixture
) -> None:
    beir_folder(write_beir(DOCUMENTS, QUERIES, [*QRELS, "q3\td1\t0"]))
    assert "1 of 3 judged queries have no relevant document, and count as 0" in caplog.text


def test_unknown_ids_can_be_ignored_and_are_counted(
    write_beir: WriteBeir, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_beir(DOCUMENTS, QUERIES, [*QRELS, "q9\td1\t1", "q1\td9\t1"])
    with pytest.raises(ValueError, match="set on_unknown='ignore'"):
        beir_folder(folder)
    with caplog.at_level(logging.WARNING):
        task = beir_folder(folder, on_unknown="ignore")
    assert task.qrels == {"q1": {"d2": 1}, "q2": {"d1": 2, "d3": 0}}
    assert "ignored 2 judgments" in caplog.text
    with pytest.raises(ValueError, match="on_unknown='skip' must be"):
        beir_folder(folder, on_unknown="skip")  # type: ignore[arg-type]


def zipped(folder: str, top: str = "beir/") -> Path:
    """The files of a folder as a zip file that lies beside it, in its place."""
    path = Path(folder)
    with ZipFile(path.with_suffix(".zip"), "w") as archive:
        archive.writestr(ZipInfo(top), "")
        for file in path.rglob("*.*"):
            archive.write(file, f"{top}{file.relative_to(path)}")
    shutil.rmtree(path)
    return path.with_suffix(".zip")


@pytest.mark.parametrize("top", ["beir/", ""])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_zip_file_of_beir_is_read_where_it_lies(
    write_beir: WriteBeir, top: str, ending: str, tmp_path: Path
) -> None:
    folder = write_beir(DOCUMENTS, QUERIES, QRELS, ending=ending)
    expected = beir_folder(folder)
    archive = zipped(folder, top)
    for path in (folder, str(archive)):
        assert beir_folder(path) == expected
        assert list(beir_texts([Path(path)], or_files=True)) == expected.documents.texts
        with pytest.raises(
            FileNotFoundError, match=r"beir\.zip has no qrels/dev\.tsv\[\.gz\] at its"
        ):
            beir_folder(path, split="dev")
    assert [path.name for path in tmp_path.iterdir()] == ["beir.zip"]


def test_faults_within_a_zip_file_have_a_line(write_beir: WriteBeir) -> None:
    folder = write_beir(DOCUMENTS, QUERIES, ["q1\td9\t1"])
    archive = zipped(folder)
    message = r"beir\.zip/beir/qrels/test\.tsv, line 2: document 'd9' is judged"
    with pytest.raises(ValueError, match=message):
        beir_folder(folder)
    with ZipFile(archive, "a") as more:
        more.writestr("other/corpus.jsonl", "")
    with pytest.raises(FileNotFoundError, match=r"has more than one corpus\.jsonl\[\.gz\]"):
        beir_folder(folder)


def test_members_that_lead_elsewhere_are_never_written(
    write_beir: WriteBeir, tmp_path: Path
) -> None:
    archive = zipped(write_beir(DOCUMENTS, QUERIES, QRELS))
    before = sorted(tmp_path.parent.rglob("*"))
    with ZipFile(archive, "a") as more:
        more.writestr("../../corpus.jsonl", "{}")
        more.writestr("/tmp/sparton-test/qrels/test.tsv", "")
    assert len(beir_folder(str(archive)).documents.ids) == 3
    assert sorted(tmp_path.parent.rglob("*")) == before


def test_a_damaged_zip_file_is_named(write_beir: WriteBeir) -> None:
    archive = zipped(write_beir(DOCUMENTS, QUERIES, QRELS))
    whole = archive.read_bytes()
    archive.write_bytes(whole.replace(b"and a body", b"and a bode"))
    with pytest.raises(ValueError, match=r"corpus\.jsonl: the zip data is damaged .*Bad CRC"):
        beir_folder(str(archive))
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"beir\.zip is no whole zip file .*get it again"):
        beir_folder(str(archive))


def test_bytes_that_are_not_utf8_are_named(write_beir: WriteBeir) -> None:
    folder = Path(write_beir(DOCUMENTS, QUERIES, QRELS))
    with (folder / "corpus.jsonl").open("ab") as file:
        file.write(b'{"_id": "d4", "text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl, line 4: not UTF-8 text: byte 0xe9"):
        beir_folder(str(folder))


def test_missing_files_say_what_is_there(write_beir: WriteBeir, tmp_path: Path) -> None:
    folder = write_beir(DOCUMENTS, QUERIES, QRELS)
    with pytest.raises(FileNotFoundError, match=r"qrels/dev\.tsv\[\.gz\] .*holds test\.tsv"):
        beir_folder(folder, split="dev")
    with pytest.raises(FileNotFoundError, match=r"corpus\.jsonl"):
        beir_folder(str(tmp_path / "nowhere"))


@pytest.mark.skipif(not DATA.is_dir(), reason="set SPARTON_DATA to the folder of the real data")
@pytest.mark.parametrize(
    ("folder", "split", "documents", "queries", "judgments"),
    [
        ("squad", "dev", 20_958, 3_974, 3_974),
        ("cranfield", "test", 1_400, 225, 1_612),
        ("cranfield", "test_graded", 1_400, 225, 1_612),
        ("medline", "test", 1_033, 30, 696),
    ],
)
def test_real_folders(
    folder: str, split: str, documents: int, queries: int, judgments: int
) -> None:
    task = beir_folder(str(DATA / folder), split)
    assert len(task.documents.ids) == documents
    assert len(task.queries.ids) == queries
    assert sum(map(len, task.qrels.values())) == judgments


@pytest.mark.parametrize("name", ["texts.csv", "texts.TSV.gz", "texts.parquet", "texts.arrow"])
def test_files_of_another_format_are_refused_before_they_are_read(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{name}: texts are read from JSON lines here: convert"):
        beir_texts([tmp_path / name], or_files=True)


def test_the_folder_where_one_is(write_beir: WriteBeir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(write_beir(DOCUMENTS, QUERIES, QRELS))
    monkeypatch.chdir(folder)
    task = beir_folder(".")
    assert task.name == f"{folder.name}/test" and task.qrels == beir_folder(str(folder)).qrels
    assert text_files(["."], "query")[0].path == Path("queries.jsonl")
    assert not has_judgments(".", "dev")
    with pytest.raises(FileNotFoundError, match=r"qrels/dev\.tsv.* does not exist; qrels holds"):
        beir_folder(".", "dev")


def test_a_folder_that_is_not_there_is_not_said_to_hold_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder \S+/nowhere\. "):
        beir_folder(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(("empty", "kind"), [("corpus", "documents"), ("queries", "queries")])
def test_an_empty_file_is_called_empty(tmp_path, empty, kind):
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d", "text": "answer"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "asked"}\n')
    (tmp_path / "qrels/test.tsv").write_text("q\td\t1\n")
    (tmp_path / f"{empty}.jsonl").write_text("")
    with pytest.raises(ValueError, match=f"there are no {kind}: the file of them is empty"):
        beir_folder(str(tmp_path))
