"""Collections of ir_datasets and of the hub to tasks; every fault is named where it stands."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ir_datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ir_datasets.datasets.beir import BeirTitleDoc
from ir_datasets.formats import BaseDocs, BaseQrels, BaseQueries, GenericQuery, TrecQrel

from sparton.datasets.downloads import hub_task, hub_texts, ir_datasets_task, ir_datasets_texts
from sparton.digests import records_digest


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


def write_hub(folder: Path, parts: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """A data set as the hub holds it: configuration to split to rows."""
    lines = ["---", "configs:"]
    for configuration, splits in parts.items():
        lines += [f"- config_name: {configuration}", "  data_files:"]
        for split, rows in splits.items():
            file = f"{configuration}/{split}-00000-of-00001.parquet"
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows), folder / file)
            lines += [f"  - split: {split}", f"    path: {file}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return str(folder)


CORPUS = [{"_id": "d1", "title": "Title", "text": "body"}, {"_id": "d2", "title": "", "text": "x"}]
ASKED = [{"_id": "q1", "text": "first query"}, {"_id": "q2", "text": "never judged"}]
JUDGED = [
    {"query-id": "q1", "corpus-id": "d1", "score": 2},
    {"query-id": "q1", "corpus-id": "d2", "score": 0},
]


def test_reads_a_data_set_of_the_hub_as_mteb_lays_it_out(tmp_path: Path) -> None:
    parts = {
        "default": {"dev": JUDGED[:1], "test": JUDGED},
        "corpus": {"corpus": CORPUS},
        "queries": {"queries": ASKED},
    }
    path = write_hub(tmp_path / "scifact", parts)
    task = hub_task(path, exclude_self=True)
    assert (task.name, task.exclude_self) == ("scifact/test", True)
    assert list(zip(*task.documents)) == [("d1", "Title body"), ("d2", "x")]
    assert list(zip(*task.queries)) == [("q1", "first query")]
    assert task.qrels == {"q1": {"d1": 2, "d2": 0}}
    assert hub_task(path, "dev").qrels == {"q1": {"d1": 2}}
    with pytest.raises(ValueError, match=r"has no train of default: it has dev, test"):
        hub_task(path, "train")
    with pytest.raises(ValueError, match=r"ar-corpus, ar-queries and ar-qrels are needed"):
        hub_task(path, subset="ar")


def test_reads_a_subset_and_judgments_without_scores(tmp_path: Path) -> None:
    """Rows as NanoBEIR's, whose splits are its collections, and configurations as MIRACL's."""
    short = [{key: row[key] for key in ("query-id", "corpus-id")} for row in JUDGED]
    texts, asked = (
        [{"id": row["_id"], "text": row["text"]} for row in side] for side in (CORPUS, ASKED)
    )
    other = [{"id": "o", "text": "other"}]
    splits = {"NanoNQ": other, "NanoSciFact": texts}
    parts = {
        "sw-corpus": splits,
        "sw-queries": splits | {"NanoSciFact": asked},
        "sw-qrels": {"NanoNQ": short[:1], "NanoSciFact": short},
    }
    path = write_hub(tmp_path / "many", parts)
    task = hub_task(path, "NanoSciFact", subset="sw")
    assert task.name == "many/sw/NanoSciFact"
    assert task.qrels == {"q1": {"d1": 1, "d2": 1}} and list(task.documents.ids) == ["d1", "d2"]


@pytest.mark.parametrize(
    ("part", "rows", "message"),
    [
        ("corpus", [{"title": "x"}], r"hub, corpus test, row 1: an object with an id"),
        ("queries", [ASKED[0], ASKED[0]], r"hub, queries test, row 2: the id 'q1' occurs a second"),
        ("qrels", [{"query-id": "q1", "score": 1}], r"qrels test, row 1: query-id, corpus-id and"),
        ("qrels", [JUDGED[0] | {"corpus-id": "d9"}], r"qrels test, row 1: document 'd9' is judged"),
    ],
)
def test_faults_of_a_data_set_of_the_hub(
    tmp_path: Path, part: str, rows: list[dict[str, Any]], message: str
) -> None:
    parts = {"corpus": CORPUS, "queries": ASKED, "qrels": JUDGED} | {part: rows}
    path = write_hub(tmp_path / "hub", {name: {"test": rows} for name, rows in parts.items()})
    with pytest.raises(ValueError, match=message):
        hub_task(path)


def test_reads_bright(tmp_path: Path) -> None:
    documents = [{"id": f"d{row}", "content": f"text {row} "} for row in range(4)]
    gold = {"gold_ids": ["d1", "d2"], "excluded_ids": ["d3"]}
    none = {"gold_ids": ["d0"], "excluded_ids": ["N/A"]}
    examples = [{"id": "0", "query": "a post"} | gold, {"id": "1", "query": "b"} | none]
    splits = {
        "documents": {"aops": documents, "pony": documents[:1]},
        "examples": {"aops": examples, "pony": examples[1:]},
    }
    task = hub_task(write_hub(tmp_path / "BRIGHT", splits), "aops")
    assert task.name == "BRIGHT/aops"
    assert list(zip(*task.documents))[1] == ("d1", "text 1")
    assert list(zip(*task.queries)) == [("0", "a post"), ("1", "b")]
    assert task.qrels == {"0": {"d1": 1, "d2": 1, "d3": -100}, "1": {"d0": 1}}
    with pytest.raises(ValueError, match="has no biology of examples: it has aops, pony"):
        hub_task(str(tmp_path / "BRIGHT"), "biology")


def test_a_data_set_that_the_hub_does_not_give(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = r"empty could not be read from the Hugging Face hub .*beir_folder reads files"
    with pytest.raises(ConnectionError, match=message):
        hub_task(str(tmp_path / "empty"))


def test_texts_to_encode_are_those_of_the_task(registered: str, tmp_path: Path) -> None:
    parts = {"corpus": CORPUS, "queries": ASKED, "qrels": JUDGED}
    hub = write_hub(tmp_path / "hub", {name: {"test": rows} for name, rows in parts.items()})
    bright = write_hub(
        tmp_path / "bright",
        {
            "documents": {"aops": [{"id": "d0", "content": " text "}]},
            "examples": {"aops": [{"id": "0", "query": "a post", "gold_ids": ["d0"]}]},
        },
    )
    cache = str(tmp_path / "cache")
    tasks = [
        (ir_datasets_task(registered), partial(ir_datasets_texts, registered)),
        (hub_task(hub), partial(hub_texts, hub)),
        (hub_task(bright, "aops"), partial(hub_texts, bright, split="aops")),
    ]
    for task, read in tasks:
        found = read(side="document", cache_dir=cache)
        assert found.digest == records_digest(*task.documents)
        assert found.digest != read(side="query", cache_dir=cache).digest
        assert found.take(range(len(found))) == task.documents
    asked = hub_texts(hub, "query", cache_dir=cache)
    assert list(asked.take(range(2)).ids) == ["q1", "q2"], "those that nobody judged as well"


def test_texts_of_the_hub_are_prepared_once(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    path = write_hub(tmp_path / "hub", {"corpus": {"test": CORPUS, "dev": CORPUS[:1]}})
    first, again = (hub_texts(path, "document", cache_dir=cache) for _ in range(2))
    assert again.table.folder == first.table.folder
    other = hub_texts(path, "document", "dev", cache_dir=cache)
    assert other.table.folder != first.table.folder and len(other) == 1


def test_faults_of_texts_to_encode(registered: str, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    with pytest.raises(ValueError, match="knows no dataset 'beir/scifakt'"):
        ir_datasets_texts("beir/scifakt", "document", cache_dir=cache)
    path = write_hub(tmp_path / "hub", {"corpus": {"test": [*CORPUS, {"title": "x"}]}})
    with pytest.raises(ValueError, match=r"corpus test, row 3: .* id is expected.*on_error="):
        hub_texts(path, "document", cache_dir=cache)
    skipping = hub_texts(path, "document", on_error="skip", cache_dir=cache)
    assert len(skipping) == 2 and skipping.table.facts["skipped"] == 1
    with pytest.raises(ValueError, match="row 3"):
        hub_texts(path, "document", cache_dir=cache)
    with pytest.raises(ValueError, match="configurations corpus: queries is needed"):
        hub_texts(path, "query", cache_dir=cache)
    twice = write_hub(tmp_path / "twice", {"corpus": {"test": [CORPUS[0], CORPUS[0]]}})
    with pytest.raises(ValueError, match=r"row 2: the id 'd1' occurs .* first at .*row 1"):
        hub_texts(twice, "document", cache_dir=cache)
