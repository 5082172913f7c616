"""BEIR folders and ir_datasets to tasks; every fault is named where it stands."""

import gzip
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ir_datasets
import pytest
from ir_datasets.datasets.beir import BeirTitleDoc
from ir_datasets.formats import BaseDocs, BaseQrels, BaseQueries, GenericQuery, TrecQrel

from sparton.datasets.collection import beir_folder
from sparton.datasets.downloads import ir_datasets_task

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
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(write_beir: WriteBeir, fault: str) -> None:
    documents, queries, qrels, message = FAULTS[fault]
    folder = write_beir(documents, queries, qrels)
    with pytest.raises(ValueError, match=message):
        beir_folder(folder)


HEADERS = ["query-id\tcorpus-id\tscore", "query_id doc-id relevance", "QID\tDocID\tlabel", ""]


@pytest.mark.parametrize("header", [*HEADERS, "query-id\tQ0\tcorpus-id\tscore"])
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


class Documents(BaseDocs):
    def __init__(self, documents: list[BeirTitleDoc]) -> None:
        self.documents = documents

    def docs_iter(self) -> Iterator[BeirTitleDoc]:
        return iter(self.documents)


class Queries(BaseQueries):
    def queries_iter(self) -> Iterator[GenericQuery]:
        yield GenericQuery("q1", "first query")
        yield GenericQuery("q2", "never judged")


class Judgments(BaseQrels):
    def qrels_iter(self) -> Iterator[TrecQrel]:
        yield TrecQrel("q1", "d1", 2, "0")
        yield TrecQrel("q1", "d2", 0, "0")


@pytest.fixture
def registered() -> Iterator[str]:
    name = "sparton-test/tiny"
    documents = Documents([BeirTitleDoc("d1", "body", "Title"), BeirTitleDoc("d2", "alone", "")])
    ir_datasets.registry.register(name, ir_datasets.Dataset(documents, Queries(), Judgments()))
    ir_datasets.registry.register(f"{name}/unjudged", ir_datasets.Dataset(documents, Queries()))
    yield name
    for key in (name, f"{name}/unjudged"):
        del ir_datasets.registry._registered[key]


def test_reads_through_ir_datasets(registered: str) -> None:
    task = ir_datasets_task(registered, exclude_self=True)
    assert task.name == registered and task.exclude_self
    assert list(zip(*task.documents)) == [("d1", "Title body"), ("d2", "alone")]
    assert list(zip(*task.queries)) == [("q1", "first query")]
    assert task.qrels == {"q1": {"d1": 2, "d2": 0}}


@pytest.mark.parametrize("part", ["docs_iter", "queries_iter", "qrels_iter"])
@pytest.mark.parametrize("lazy", [True, False])
def test_a_failed_download_says_what_to_do_without(
    registered: str, monkeypatch: pytest.MonkeyPatch, part: str, lazy: bool
) -> None:
    def fail(*_: object) -> Iterator[None]:
        raise ConnectionError("no route to host")

    def fail_when_read(*_: object) -> Iterator[None]:
        yield fail()  # type: ignore[misc]

    owner = {"docs_iter": Documents, "queries_iter": Queries, "qrels_iter": Judgments}[part]
    monkeypatch.setattr(owner, part, fail_when_read if lazy else fail)
    message = (
        rf"could not fetch {registered} \(no route to host\).*beir_folder reads the same collection"
    )
    with pytest.raises(OSError, match=message):
        ir_datasets_task(registered)


def test_ir_datasets_ids_with_white_space(registered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = [GenericQuery("q1", "first query"), GenericQuery("q 2", "second")]
    monkeypatch.setattr(Queries, "queries_iter", lambda _: iter(queries))
    with pytest.raises(ValueError, match=f"{registered}, query 2: the id 'q 2' holds white"):
        ir_datasets_task(registered)


def test_ir_datasets_without_judgments_or_unknown(registered: str) -> None:
    with pytest.raises(ValueError, match="unjudged of ir_datasets has no qrels"):
        ir_datasets_task(f"{registered}/unjudged")
    with pytest.raises(ValueError, match="knows no dataset 'beir/scifakt'"):
        ir_datasets_task("beir/scifakt")


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
