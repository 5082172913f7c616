"""Evaluation tasks: a collection, its judged queries, and their graded judgments.

Everything is checked while it is read, so that a fault in a file stops the run before anything is
encoded and not after an hour of it.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sparton.arguments import ArgumentError
from sparton.datasets.files import DataFile, RecordError, decode_json, decode_text, read_lines
from sparton.datasets.records import parse_text
from sparton.types import RetrievalTask, TextCollection

OnUnknown = Literal["error", "ignore"]
Qrels = dict[str, dict[str, int]]

# What the columns of a qrels file may be called in its first line, case, hyphens and so on aside.
HEADER = (
    {"queryid", "qid", "query", "topicid", "topic"},
    {"corpusid", "documentid", "docid", "did", "docno", "passageid", "pid", "corpus", "document"},
    {"score", "grade", "relevance", "rel", "label", "judgment"},
)

logger = logging.getLogger(__name__)


class Judgment(NamedTuple):
    """One line of a qrels file; ``number`` is that of the line, from 1."""

    query_id: str
    document_id: str
    grade: int
    number: int


@contextmanager
def read_before() -> Iterator[None]:
    """Tasks that were read to check them, and reported then, are read again without a report."""
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


def beir_folder(
    path: str,
    split: str = "test",
    *,
    name: str | None = None,
    exclude_self: bool = False,
    qrels: str | None = None,
    on_unknown: OnUnknown = "error",
) -> RetrievalTask:
    """Read a folder in the layout of BEIR; every file may be gzipped.

    ``corpus.jsonl`` has ``_id``, ``title`` (optional) and ``text``; ``queries.jsonl`` has ``_id``
    and ``text``; ``qrels/<split>.tsv`` has query id, document id and integer grade, with or
    without a header, or the four columns of TREC. Queries without a judgment are left out. Grades
    stay as they are.

    Args:
        path: the folder.
        split: name of the judgments file in ``qrels``.
        name: shown in tables; by default the folder's name and the split.
        exclude_self: leave a document with the query's own id out of its ranking.
        qrels: a judgments file elsewhere, instead of ``qrels/<split>.tsv``.
        on_unknown: what a judgment of an unknown query or document does. ``ignore`` drops and
            counts it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: malformed or contradictory content, or an id with white space, naming file and
            line.
    """
    folder = Path(path)
    documents = _collect(read_texts(beir_file(folder, "corpus.jsonl")))
    queries = _collect(read_texts(beir_file(folder, "queries.jsonl")))
    judged = DataFile(qrels, Path(qrels)) if qrels else beir_file(folder, f"qrels/{split}.tsv")
    return _build_task(
        name or f"{folder.name}/{split}",
        documents,
        queries,
        read_judgments(judged),
        place=judged.place,
        on_unknown=on_unknown,
        exclude_self=exclude_self,
    )


def ir_datasets_task(
    dataset_id: str,
    *,
    name: str | None = None,
    exclude_self: bool = False,
    on_unknown: OnUnknown = "error",
) -> RetrievalTask:
    """Read a collection with queries and judgments through ir_datasets, which downloads it once.

    Args:
        dataset_id: for example ``beir/scifact/test``.
        name: shown in tables; by default the id.
        exclude_self: leave a document with the query's own id out of its ranking.
        on_unknown: as in :func:`beir_folder`.

    Raises:
        ValueError: an id that ir_datasets does not know, or one without documents, queries or
            judgments.
        OSError: the download failed.
    """
    import ir_datasets

    try:
        dataset = ir_datasets.load(dataset_id)
    except KeyError as error:
        raise ValueError(
            f"ir_datasets knows no dataset {dataset_id!r}: see https://ir-datasets.com, or give a "
            "folder in the layout of BEIR to beir_folder"
        ) from error
    for part in ("docs", "queries", "qrels"):
        if not getattr(dataset, f"has_{part}")():
            raise ValueError(f"{dataset_id} of ir_datasets has no {part}: name a split, as /test")
    try:
        judgments = (
            Judgment(each.query_id, each.doc_id, int(each.relevance), number)
            for number, each in enumerate(dataset.qrels_iter(), start=1)
        )
        return _build_task(
            name or dataset_id,
            _collect(_ir_texts(dataset_id, "document", dataset.docs_iter())),
            _collect(_ir_texts(dataset_id, "query", dataset.queries_iter())),
            judgments,
            place=lambda number: f"{dataset_id}, judgment {number}",
            on_unknown=on_unknown,
            exclude_self=exclude_self,
        )
    except OSError as error:
        raise OSError(
            f"ir_datasets could not fetch {dataset_id} ({error}). Without a connection, "
            "beir_folder reads the same collection from files in the layout of BEIR"
        ) from error


def beir_file(folder: Path, name: str) -> DataFile:
    """``name`` in ``folder``, plain or with .gz at the end."""
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return DataFile(str(candidate), candidate)
    place = (folder / name).parent
    held = ", ".join(sorted(each.name for each in place.iterdir())) if place.is_dir() else "nothing"
    raise FileNotFoundError(
        f"{folder / name}[.gz] does not exist; {place} holds {held or 'nothing'}. A folder in the "
        "layout of BEIR has corpus.jsonl, queries.jsonl and qrels/<split>.tsv"
    )


def read_texts(file: DataFile) -> Iterator[tuple[str, str, str]]:
    """Place, id and text of every record of a BEIR corpus or query file."""
    for number, line in read_lines(file):
        try:
            yield (file.place(number), *parse_text(decode_json(line)))
        except RecordError as error:
            raise ValueError(f"{file.place(number)}: {error}") from error


def read_judgments(file: DataFile) -> Iterator[Judgment]:
    """The lines of a qrels file."""
    for number, line in read_lines(file):
        place = file.place(number)
        try:
            fields = decode_text(line).split("\t" if b"\t" in line else None)
        except RecordError as error:
            raise ValueError(f"{place}: {error}") from error
        if len(fields) == 4:
            del fields[1]
        if len(fields) != 3:
            raise ValueError(f"{place}: query id, document id and grade are expected, not {fields}")
        query_id, document_id, grade = fields
        try:
            yield Judgment(query_id, document_id, int(grade), number)
        except ValueError as error:
            if number == 1 and _is_header(fields):
                continue
            raise ValueError(
                f"{place}: the grade {grade!r} is not an integer: correct the line, or name the "
                "columns query-id, corpus-id, score if it is a header"
            ) from error


def _is_header(fields: list[str]) -> bool:
    names = (re.sub(r"[\W_]+", "", field).lower() for field in fields)
    return all(name in known for name, known in zip(names, HEADER, strict=True))


def _ir_texts(dataset_id: str, kind: str, records: Iterable[Any]) -> Iterator[tuple[str, str, str]]:
    for number, record in enumerate(records, start=1):
        yield f"{dataset_id}, {kind} {number}", record[0], record.default_text().strip()


def _collect(entries: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for place, identifier, text in entries:
        if identifier in texts:
            raise ValueError(f"{place}: the id {identifier!r} occurs a second time")
        if identifier.split() != [identifier]:
            raise ValueError(
                f"{place}: the id {identifier!r} holds white space, which the TREC files of a "
                "run's results cannot express: rename it there and in the judgments"
            )
        texts[identifier] = text
    return texts


def _build_task(
    name: str,
    documents: dict[str, str],
    queries: dict[str, str],
    judgments: Iterable[Judgment],
    *,
    place: Callable[[int], str],
    on_unknown: OnUnknown,
    exclude_self: bool,
) -> RetrievalTask:
    if on_unknown not in ("error", "ignore"):
        raise ValueError(f"on_unknown={on_unknown!r} must be 'error' or 'ignore'")
    qrels: Qrels = {}
    ignored = 0
    for judgment in judgments:
        unknown = _unknown(judgment, documents, queries)
        if unknown and on_unknown == "error":
            raise ArgumentError(
                "{}: {}. Use the collection that the judgments were made for, or set {on_unknown} "
                "to leave such judgments out",
                place(judgment.number),
                unknown,
                on_unknown="ignore",
            )
        if unknown:
            ignored += 1
            continue
        grades = qrels.setdefault(judgment.query_id, {})
        known = grades.setdefault(judgment.document_id, judgment.grade)
        if known != judgment.grade:
            raise ValueError(
                f"{place(judgment.number)}: query {judgment.query_id!r} and document "
                f"{judgment.document_id!r} were judged {known} before and {judgment.grade} here"
            )
    if not qrels:
        raise ValueError(f"{name}: no judgment is left for any query")
    judged = {key: text for key, text in queries.items() if key in qrels}
    _report(name, documents, judged, ignored)
    return RetrievalTask(
        name,
        TextCollection(list(documents), list(documents.values())),
        TextCollection(list(judged), list(judged.values())),
        {key: qrels[key] for key in judged},
        exclude_self,
    )


def _unknown(judgment: Judgment, documents: dict[str, str], queries: dict[str, str]) -> str | None:
    if judgment.query_id not in queries:
        return f"query {judgment.query_id!r} is judged but not among the {len(queries)} queries"
    if judgment.document_id not in documents:
        return (
            f"document {judgment.document_id!r} is judged but not among the {len(documents)} "
            "documents"
        )
    return None


def _report(name: str, documents: dict[str, str], queries: dict[str, str], ignored: int) -> None:
    for kind, texts in (("documents", documents), ("queries", queries)):
        empty = sum(not text for text in texts.values())
        if empty:
            logger.warning("%s: %d of %d %s are empty; kept", name, empty, len(texts), kind)
    if ignored:
        logger.warning("%s: ignored %d judgments of unknown ids", name, ignored)
    logger.info("%s: %d documents, %d judged queries", name, len(documents), len(queries))
