"""Files of every format in which something is wrong, and what may come of reading one."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from sparton.datasets.collection import beir_folder
from sparton.datasets.sources import beir_pairs, id_records, text_records
from sparton.datasets.tasks import trec_task
from sparton.types import RetrievalTask

PLACE = re.compile(r"(line|row|after row) \d+")
DEEP, LONG = "[" * 100_000, "9" * 5000
ODD_TEXTS = [
    "", " ", "1_0", "٣", "1e39", "-inf", "nan", "[", "[1, 2", '["d0"]', "[[1.0], [2.0]]", "\x00",
    "a\tb", 'a"b', "\u2028", DEEP, LONG,
]  # fmt: skip
TEXTS = st.sampled_from(["d0", "d1", "q0", "a text", *ODD_TEXTS]) | st.text(max_size=5)
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, 0.5, 3.5e38, 1e308, float("nan")])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from([
    "query", "anchor", "positive", "pos", "negatives", "neg", "negative_1", "negative_٣",
    f"negative_{LONG}", "documents", "scores", "pos_scores", "neg_scores", "set", "label",
    "query_id", "qid", "positive_id", "pid", "negative_ids", "document_ids",
    "_id", "id", "title", "text",
])  # fmt: skip
NOT_ARROW = (pa.ArrowException, OverflowError, AttributeError, TypeError)
RAW = st.binary(max_size=12) | st.sampled_from([
    DEEP.encode(), LONG.encode(), b'{"a": ' * 100_000, b'"\\ud800"', b"[1, 2", b"NaN", b"\xff",
    b'{"query": "a", "query": "b", "positive": "c"}', b'{"_id": "d0", "text": ["a"]}',
    f'{{"query": "a", "positive": "b", "label": {LONG}}}'.encode(),
    f'{{"query": "a", "pos": ["b"], "scores": {DEEP}}}'.encode(),
    f'{{"query": "a", "positive": "b", "scores": {10**400}}}'.encode(),
    f'{{"query_id": "q0", "positive_id": "d0", "label": {10**400}}}'.encode(),
    f'{{"query": "a", "positive": "b", "negative_{LONG}": "c"}}'.encode(),
    b'{"query": "a", "positive": "b", "scores": 1e39}',
])  # fmt: skip

GOOD = {
    "text": {"query": "a question of five words", "positive": "an answer of five words"},
    "id": {"query_id": "q0", "positive_id": "d0"},
    "collection": {"_id": "d0", "text": "a document of five words"},
    "queries": {"_id": "q0", "text": "a question of five words"},
    "judgment": {"query": "q0", "document": "d0", "grade": 1},
}
# Well-formed records of which one part is then replaced.
WHOLE = {
    "text": [
        {"query": "a", "pos": ["b"], "neg": ["c"], "pos_scores": [1], "neg_scores": [0.5]},
        {"query": "a", "documents": ["b", "c"], "scores": [[1, 2], [3, 1]]},
        {"query": "a", "positive": "b", "negative_1": "c", "scores": [1, 2], "label": 1},
        {"set": ["a", "b"]},
    ],
    "id": [
        {"query_id": "q0", "positive_id": "d0", "negative_ids": ["d0"], "scores": [1, 2]},
        {"qid": "q0", "document_ids": ["d0"], "scores": [1]},
    ],
    "collection": [{"_id": "d1", "title": "a", "text": "b"}],
}  # fmt: skip


@st.composite
def records(draw: st.DrawFn, kind: str) -> Any:
    """A value of JSON that looks like a record, or a record with one part of it replaced."""
    whole = draw(st.sampled_from(WHOLE[kind]))
    own = {draw(NAMES): draw(VALUES) for _ in range(draw(st.integers(0, 2)))}
    replaced = whole | {draw(st.sampled_from(list(whole))): draw(VALUES)}
    as_list = [*own.values(), *whole.values()]
    return draw(st.sampled_from([replaced, whole | own, own, as_list, as_list[:2]]))


def lines(kind: str, parted: str | None) -> st.SearchStrategy[bytes]:
    """A line of a file, or nearly: JSON, or fields parted by a character."""
    if parted is None:
        return records(kind).map(lambda record: json.dumps(record).encode()) | RAW
    cells = st.lists(st.sampled_from([*map(str, GOOD[kind].values())]) | TEXTS, max_size=4)
    return cells.map(lambda each: parted.join(each).encode(errors="surrogatepass")) | RAW


def good_line(kind: str, parted: str | None) -> bytes:
    """A line with which nothing is wrong."""
    good = GOOD[kind]
    return (json.dumps(good) if parted is None else parted.join(map(str, good.values()))).encode()


def write_lines(file: Path, kind: str, parted: str | None, raw: bytes) -> None:
    """A file of a good line and another one."""
    file.write_bytes(good_line(kind, parted) + b"\n" + raw + b"\n")


def write_array(file: Path, kind: str, parted: str | None, raw: bytes) -> None:
    """A list of a good record and another one."""
    file.write_bytes(b"[" + good_line(kind, parted) + b",\n" + raw + b"\n]\n")


def write_parquet(file: Path, kind: str, parted: str | None, raw: bytes) -> None:
    """A table of a good record and another one, if Arrow can hold them."""
    try:
        table = pa.Table.from_pylist([GOOD[kind], json.loads(raw)])
    except (*NOT_ARROW, ValueError, RecursionError):
        table = pa.Table.from_pylist([GOOD[kind], {}])
    pq.write_table(table, file)


def write_texts(folder: Path) -> None:
    """The texts that ids stand for, with a judgment of one of them."""
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "corpus.jsonl").write_text(json.dumps(GOOD["collection"]) + "\n")
    (folder / "queries.jsonl").write_text(json.dumps(GOOD["queries"]) + "\n")
    (folder / "qrels/test.tsv").write_text("q0\td0\t1\n")


Read = Callable[[Path, str], Any]


def as_texts(file: Path, on_error: str) -> Any:
    source = text_records(str(file), on_error=on_error)
    return [source.example(row, 0, 1) for row in range(len(source))]


def as_ids(file: Path, on_error: str) -> Any:
    texts = [str(file.with_name(f"{name}.jsonl")) for name in ("queries", "corpus")]
    source = id_records(str(file), *texts, on_error=on_error)
    return [source.example(row, 0, 1) for row in range(len(source))]


def as_collection(file: Path, on_error: str) -> Any:
    queries = file.with_name("queries.jsonl")
    judged = file.with_name("ids.tsv")
    judged.write_text("q0\td0\n")
    return len(id_records(str(judged), str(queries), str(file), on_error=on_error))


def as_pairs(file: Path, on_error: str) -> Any:
    return len(beir_pairs(str(file.parent.parent), "judged", on_error=on_error))


def as_judgments(file: Path, on_error: str) -> RetrievalTask:
    return beir_folder(str(file.parent.parent), "judged")


def as_documents(file: Path, on_error: str) -> RetrievalTask:
    texts = [str(file), str(file.with_name("queries.jsonl"))]
    return trec_task(*texts, str(file.with_name("qrels") / "test.tsv"))


class Format(NamedTuple):
    """A kind of file: how it is called, written and read, and whether a line can be skipped."""

    name: str
    read: Read
    kind: str
    parted: str | None = None
    write: Callable[[Path, str, str | None, bytes], None] = write_lines
    skips: bool = True


FORMATS = {
    "texts as JSON lines": Format("texts.jsonl", as_texts, "text"),
    "texts as a list": Format("texts.json", as_texts, "text", None, write_array, False),
    "texts as TSV": Format("texts.tsv", as_texts, "text", "\t"),
    "texts as CSV": Format("texts.csv", as_texts, "text", ",", skips=False),
    "texts as Parquet": Format("texts.parquet", as_texts, "text", None, write_parquet),
    "ids as JSON lines": Format("ids.jsonl", as_ids, "id"),
    "ids as TSV": Format("own.tsv", as_ids, "id", "\t"),
    "a collection": Format("texts.jsonl", as_collection, "collection", skips=False),
    "a collection as TSV": Format("texts.tsv", as_collection, "collection", "\t", skips=False),
    "pairs of judgments": Format("qrels/judged.tsv", as_pairs, "judgment", "\t"),
    "the documents of a task": Format("texts.jsonl", as_documents, "collection", skips=False),
    "the judgments of a task": Format(
        "qrels/judged.tsv", as_judgments, "judgment", "\t", skips=False
    ),
}


def outcome(read: Read, file: Path, on_error: str) -> str:
    """``value``, ``refused`` with a sentence that names file and line, or what is wrong with it."""
    try:
        read(file, on_error)
    except ValueError as error:
        said = str(error)
        if isinstance(error, UnicodeError) or file.name not in said:
            return f"no file: {type(error).__name__}: {said[:200]}"
        if not PLACE.search(said):
            return f"no line: {said[:200]}"
        return "refused" if "\n" not in said else f"several lines: {said[:200]}"
    except Exception as error:  # what else there is, is a traceback
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "value"
