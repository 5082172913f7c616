"""Training sources prepared from files: texts, ids, and the pairs of a BEIR folder.

All are converted once into memory-mapped tables; opening a prepared source compares their digests.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypedDict, get_args

from sparton.arguments import ArgumentError, refuse_other
from sparton.datasets.collection import beir_file
from sparton.datasets.columns import ID_EXAMPLES, TEXT_EXAMPLES
from sparton.datasets.examples import example_table
from sparton.datasets.files import DataFile, RecordError, locate
from sparton.datasets.judgments import read_judgments
from sparton.datasets.lookup import Negatives, Records
from sparton.datasets.preparation import OnError, Placed, Reading, Tally, read_records
from sparton.datasets.records import IDS, TEXTS, Kind, Row, parse_record
from sparton.datasets.store import LAYOUT_VERSION, fingerprint
from sparton.datasets.tables import Columns
from sparton.datasets.teachers import EQUAL_TEACHERS, Teachers
from sparton.datasets.texts import Texts, text_table


class SourceOptions(TypedDict, total=False):
    """How the records of a source are found and read; see :func:`text_records`."""

    root: str | None
    hub: str | None
    format: str
    columns: Columns | None
    on_error: OnError
    limit: int | None
    limit_seed: int
    negatives: Negatives
    teachers: Teachers | Mapping[str, Any]
    cache_dir: str | None


def text_records(
    files: str | Sequence[str],
    *,
    root: str | None = None,
    hub: str | None = None,
    format: str = "auto",
    columns: Columns | None = None,
    on_error: OnError = "stop",
    limit: int | None = None,
    limit_seed: int = 0,
    negatives: Negatives = "sample",
    teachers: Teachers | Mapping[str, Any] = EQUAL_TEACHERS,
    name: str | None = None,
    cache_dir: str | None = None,
) -> Records:
    """Training examples written out as texts, in any shape of :mod:`sparton.datasets.records`.

    Args:
        files: names or glob patterns; JSON lines, JSON, TSV, CSV (gzipped or not), Parquet or
            Arrow, or a folder that ``Dataset.save_to_disk`` of `datasets` wrote.
        root: local folder of the files.
        hub: dataset repository on the Hugging Face hub to take them from if ``root`` is None.
        format: jsonl, tsv, csv, parquet, arrow, or auto for the ending of each file.
        columns: names in the files, to known ones; or of TSV and CSV without a header, in order.
            Other columns go by aliases and order, see :func:`sparton.datasets.columns.assign`.
        on_error: stop at a malformed record, or skip and count it.
        limit: take this many records at random, malformed ones among them; the files are then read
            twice.
        limit_seed: which part ``limit`` takes.
        negatives: "sample" draws negatives of each record's own, and none where it has none: such a
            query is compared with the other documents of its batch alone. "required" counts a
            record without negatives as malformed. "none" leaves all negatives unused.
        teachers: how the scores of several teachers are combined, refused where the records do not
            have several; and which negatives they leave. Or the fields of such.
        name: for messages.
        cache_dir: by default the cache of `datasets`.

    Raises:
        FileNotFoundError, ValueError: what is wrong, with file and line.
    """
    reading = Reading(format, columns, on_error, limit, limit_seed)
    reading.check()
    refuse_other(get_args(Negatives), negatives=negatives)
    found = locate(files, root=root, hub=hub)
    return _records(
        name or found[0].name, found, reading, negatives, Teachers.of(teachers), cache_dir=cache_dir
    )


def mined_records(source: Records, file: Path, *, cache_dir: str | None = None) -> Records:
    """The examples of a source with other negatives: those of a file that was mined for them, of
    texts, or of ids where the source has such.

    Raises:
        ValueError: a malformed record, with its line.
    """
    files, kind = [DataFile(file.name, file)], TEXTS if source.texts is None else IDS
    texts = [side.table.folder.name for side in source.texts or ()]
    key = fingerprint(files, kind="mined", texts=texts)
    read = _reader(files, Reading(), kind, False, EQUAL_TEACHERS)
    table = example_table(
        source.name,
        key,
        read,
        on_error="stop",
        files=files,
        texts=source.texts,
        cache_dir=cache_dir,
    )
    return Records(source.name, table, source.texts, source.negatives)


def listed_records(
    records: Iterable[object], *, name: str = "examples", cache_dir: str | None = None
) -> Records:
    """Training examples in memory, written out as texts.

    Args:
        records: ``(query, positive, negatives ...)``, or in any other shape of
            :mod:`sparton.datasets.records`.
        name: for messages.
        cache_dir: by default the cache of `datasets`.

    Raises:
        ValueError: a malformed record, with its number.
    """
    listed = [list(record) if isinstance(record, tuple) else record for record in records]
    written = json.dumps([LAYOUT_VERSION, listed], default=repr)  # what is no JSON is refused below
    key = hashlib.sha256(written.encode()).hexdigest()[:32]

    def read(tally: Tally) -> Iterator[Placed]:
        for number, record in enumerate(listed, start=1):
            placed = Placed(DataFile(name, Path()), number, None)
            try:
                yield placed._replace(value=parse_record(record, TEXTS))
            except RecordError as fault:
                tally.reject(placed.place, fault)

    return Records(name, example_table(name, key, read, on_error="stop", cache_dir=cache_dir))


def id_records(
    files: str | Sequence[str],
    queries: str | Sequence[str],
    collection: str | Sequence[str],
    *,
    root: str | None = None,
    hub: str | None = None,
    format: str = "auto",
    columns: Columns | None = None,
    query_columns: Columns | None = None,
    collection_columns: Columns | None = None,
    on_error: OnError = "stop",
    limit: int | None = None,
    limit_seed: int = 0,
    negatives: Negatives = "sample",
    teachers: Teachers | Mapping[str, Any] = EQUAL_TEACHERS,
    name: str | None = None,
    cache_dir: str | None = None,
) -> Records:
    """Training examples written as ids, with the texts in files of their own.

    Examples may be TSV (query id, positive id, negative ids ...) or records with ``query_id`` and
    ``positive_id`` and ``negative_ids``, or ``document_ids`` and ``scores``, of which the highest
    scored is the positive. Every id is resolved while preparing.

    Args:
        files: the examples.
        queries: id and text of the queries: TSV, or records with ``_id`` (or id, query_id), text.
        collection: id, text and perhaps title of the documents: TSV, or records with ``_id`` (or
            id, document_id), text, title.
        columns, query_columns, collection_columns: as ``columns`` of :func:`text_records`.
        root, hub, format, on_error, limit, limit_seed, negatives, teachers, name, cache_dir: as
            there; root, hub hold for all the files, ``format`` for the examples only.

    Raises:
        FileNotFoundError, ValueError: what is wrong, with file and line; also unknown ids.
    """
    reading = Reading(format, columns, on_error, limit, limit_seed)
    reading.check()
    refuse_other(get_args(Negatives), negatives=negatives)
    found = locate(files, root=root, hub=hub)
    name = name or found[0].name
    sides = [
        text_table(f"{name} ({part})", located, Reading("auto", names, on_error), cache_dir)
        for part, located, names in (
            ("queries", locate(queries, root=root, hub=hub), query_columns),
            ("collection", locate(collection, root=root, hub=hub), collection_columns),
        )
    ]
    texts = (sides[0], sides[1])
    return _records(name, found, reading, negatives, Teachers.of(teachers), texts, cache_dir)


def beir_pairs(
    path: str,
    split: str = "train",
    *,
    on_error: OnError = "stop",
    name: str | None = None,
    cache_dir: str | None = None,
) -> Records:
    """Query and relevant document (grade 1 or more) for every such judgment of a BEIR folder.

    Args:
        path: folder as :func:`sparton.datasets.collection.beir_folder` reads it.
        split: name of the judgments file in ``qrels``.
        on_error: stop at a malformed judgment or one of an unknown id, or skip and count it.
        name: for messages; by default the folder's name and the split.
        cache_dir: by default the cache of `datasets`.

    Raises:
        FileNotFoundError, ValueError: what is wrong, with file and line.
    """
    reading = Reading(on_error=on_error)
    reading.check()
    folder = Path(path)
    name = name or f"{folder.absolute().name}/{split}"
    judgments = beir_file(folder, f"qrels/{split}.tsv")
    queries, documents = (
        text_table(f"{name} ({file})", [beir_file(folder, f"{file}.jsonl")], reading, cache_dir)
        for file in ("queries", "corpus")
    )
    texts = (queries, documents)
    folders = [side.table.folder.name for side in texts]
    key = fingerprint([judgments], kind="beir", reading=reading, texts=folders)

    def read(tally: Tally) -> Iterator[Placed]:
        for judgment in read_judgments(judgments, tally.reject):
            if judgment.grade >= 1:
                row = Row(judgment.query_id, [judgment.document_id], [], [])
                yield Placed(judgments, judgment.number, row)

    table = example_table(
        name, key, read, on_error=on_error, files=[judgments], texts=texts, cache_dir=cache_dir
    )
    return Records(name, table, texts)


def _records(
    name: str,
    files: Sequence[DataFile],
    reading: Reading,
    negatives: Negatives,
    teachers: Teachers,
    texts: Texts | None = None,
    cache_dir: str | None = None,
) -> Records:
    """Examples written out as texts, or as ids of these ``texts``."""
    required, kind = negatives == "required", TEXTS if texts is None else IDS
    settings: dict[str, Any] = {"negatives": required, "teachers": asdict(teachers)}
    if texts is not None:
        settings["texts"] = [side.table.folder.name for side in texts]
    key = fingerprint(files, kind=kind.name, reading=reading, **settings)
    read = _reader(files, reading, kind, required, teachers)
    table = example_table(
        name,
        key,
        read,
        on_error=reading.on_error,
        files=files,
        texts=texts,
        cache_dir=cache_dir,
    )
    if table.facts["teachers"] == 1 and replace(teachers, share=None) != EQUAL_TEACHERS:
        raise ArgumentError(
            "{teachers:name} of source {} says how the scores of several teachers are combined, "
            "but its records have those of one at most: leave it out",
            name,
            teachers=None,
        )
    return Records(name, table, texts, negatives, teachers.share)


def _reader(
    files: Sequence[DataFile],
    reading: Reading,
    kind: Kind,
    negatives_required: bool,
    teachers: Teachers,
) -> Callable[[Tally], Iterator[Placed]]:
    def parse(record: object) -> Row:
        row = parse_record(record, kind, teachers)
        if negatives_required and not row.negatives:
            left = "" if teachers.share is None else " that teachers.share leaves"
            raise RecordError(f"no negatives{left}")
        return row

    schema = TEXT_EXAMPLES if kind is TEXTS else ID_EXAMPLES

    def read(tally: Tally) -> Iterator[Placed]:
        return read_records(files, reading, parse, tally, schema)

    return read
