"""Training sources prepared from files: texts, ids, and the pairs of a BEIR folder.

All are converted once into memory-mapped tables; opening a prepared source takes milliseconds.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from sparton.arguments import ArgumentError
from sparton.datasets.collection import beir_file
from sparton.datasets.columns import ID_EXAMPLES, TEXT_EXAMPLES
from sparton.datasets.examples import example_table
from sparton.datasets.files import DataFile, RecordError, locate
from sparton.datasets.judgments import read_judgments
from sparton.datasets.preparation import Columns, OnError, Placed, Reading, Tally, read_records
from sparton.datasets.records import IDS, TEXTS, Kind, Row, parse_record
from sparton.datasets.store import LAYOUT_VERSION, StoredTable, fingerprint
from sparton.datasets.texts import TextTable, text_table
from sparton.types import Example


class Records:
    """Training examples in a memory-mapped table, looked up by number.

    Args:
        name: for messages.
        table: columns query, positives, negatives, scores.
        texts: where the table holds row numbers instead of texts, the texts of queries and of
            documents.
    """

    def __init__(
        self, name: str, table: StoredTable, texts: tuple[TextTable, TextTable] | None = None
    ) -> None:
        self.name = name
        self.table = table
        self.texts = texts

    def __len__(self) -> int:
        return len(self.table.rows)

    def check(self, num_negatives: int) -> None:
        """Raise ValueError if some record cannot give ``num_negatives`` negatives."""
        bare = self.table.facts["first_without_negatives"]
        if num_negatives and bare:
            raise ArgumentError(
                "{}: {num_negatives}, but {} has no negatives: set {num_negatives:name} to 0, or "
                "{require_negatives} of the source with {on_error} to leave such records out",
                self.name,
                bare,
                num_negatives=num_negatives,
                require_negatives=True,
                on_error="skip",
            )

    def queries(self) -> Iterator[list[str]]:
        """The query of every record, in order, in lists; of a set its first text."""
        for batch in self.table.rows.data.to_batches():
            cells = batch.column("query")
            if self.texts:
                yield self.texts[0].table.rows.data.column("text").take(cells).to_pylist()
                continue
            yield [
                query or batch.column("positives")[row][0].as_py()
                for row, query in enumerate(cells.to_pylist())
            ]

    def judged(self, index: int) -> tuple[str, list[str]]:
        """The query of a record as :meth:`queries` gives it, and all its positives; of a set, its
        other texts."""
        query, positives = (cell.as_py() for cell in self.table.row[index][:2])
        if self.texts:
            queries, documents = self.texts
            return queries.text(query), [documents.text(row) for row in positives]
        return (query, positives) if query else (positives[0], positives[1:])

    def example(self, index: int, draw: int, num_negatives: int) -> Example:
        """Example ``index`` as texts, with as many teacher scores as documents, or none.

        ``draw`` chooses one of several positives, and the negatives: without replacement where the
        record has enough; otherwise each is taken once before any is taken again. Of a set it
        chooses the query and the positive.
        """
        cell, *lists = self.table.row[index]
        query = cell.as_py()
        positives, negatives, scores = (each.values for each in lists)
        if num_negatives and not len(negatives):
            raise ValueError(f"{self.name}: example {index} has no negatives")
        generator = random.Random(draw)
        if query == "":
            first, second = _choose(len(positives), 2, generator)
            return Example(positives[first].as_py(), positives[second].as_py())
        chosen = int(generator.random() * len(positives))
        others = _choose(len(negatives), num_negatives, generator)
        cells = [positives[chosen].as_py(), *(negatives[other].as_py() for other in others)]
        kept = [chosen, *(len(positives) + other for other in others)] if len(scores) else []
        if self.texts:
            query = self.texts[0].text(query)
            cells = [self.texts[1].text(cell) for cell in cells]
        teacher_scores = tuple(scores[place].as_py() for place in kept)
        return Example(query, cells[0], tuple(cells[1:]), teacher_scores)


def _choose(size: int, count: int, generator: random.Random) -> list[int]:
    """``count`` of ``size`` numbers in random order, none again before all were taken."""
    chosen: list[int] = []
    while len(chosen) < count:
        order = list(range(size))
        for place in range(min(size, count - len(chosen))):
            other = place + int(generator.random() * (size - place))
            order[place], order[other] = order[other], order[place]
            chosen.append(order[place])
    return chosen


def text_records(
    files: str | Sequence[str],
    *,
    root: str | None = None,
    hub: str | None = None,
    format: str = "auto",
    columns: Columns | None = None,
    on_error: OnError = "stop",
    limit: int | None = None,
    require_negatives: bool = False,
    name: str | None = None,
    cache_dir: str | None = None,
) -> Records:
    """Training examples written out as texts, in any shape of :mod:`sparton.datasets.records`.

    Args:
        files: names or glob patterns; JSON lines, JSON, TSV, CSV (gzipped or not) or Parquet.
        root: local folder of the files.
        hub: dataset repository on the Hugging Face hub to take them from if ``root`` is None.
        format: jsonl, tsv, csv, parquet, or auto for the ending of each file.
        columns: names in the files, to known ones; or of TSV and CSV without a header, in order.
            Other columns go by aliases and order, see :func:`sparton.datasets.columns.assign`.
        on_error: stop at a malformed record, or skip and count it.
        limit: take this many records from the start.
        require_negatives: count a record without negatives as malformed.
        name: for messages.
        cache_dir: by default the cache of `datasets`.

    Raises:
        FileNotFoundError, ValueError: what is wrong, with file and line.
    """
    reading = Reading(format, columns, on_error, limit)
    reading.check()
    found = locate(files, root=root, hub=hub)
    read = _reader(found, reading, TEXTS, require_negatives)
    key = fingerprint(found, kind="text", reading=reading, negatives=require_negatives)
    name = name or found[0].name
    return Records(name, example_table(name, key, read, on_error=on_error, cache_dir=cache_dir))


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
    key = hashlib.sha256(json.dumps([LAYOUT_VERSION, listed]).encode()).hexdigest()[:32]

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
    require_negatives: bool = False,
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
        root, hub, format, on_error, limit, require_negatives, name, cache_dir: as there; root, hub
            hold for all the files, ``format`` for the examples only.

    Raises:
        FileNotFoundError, ValueError: what is wrong, with file and line; also unknown ids.
    """
    reading = Reading(format, columns, on_error, limit)
    reading.check()
    found = locate(files, root=root, hub=hub)
    name = name or found[0].name
    sides = [
        text_table(f"{name} ({part})", located, Reading(columns=names), cache_dir)
        for part, located, names in (
            ("queries", locate(queries, root=root, hub=hub), query_columns),
            ("collection", locate(collection, root=root, hub=hub), collection_columns),
        )
    ]
    read = _reader(found, reading, IDS, require_negatives)
    key = fingerprint(
        found,
        kind="id",
        reading=reading,
        negatives=require_negatives,
        texts=[side.table.folder.name for side in sides],
    )
    texts = (sides[0], sides[1])
    table = example_table(name, key, read, on_error=on_error, texts=texts, cache_dir=cache_dir)
    return Records(name, table, texts)


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
        on_error: stop at a judgment of an unknown id, or skip and count it.
        name: for messages; by default the folder's name and the split.
        cache_dir: by default the cache of `datasets`.

    Raises:
        FileNotFoundError, ValueError: what is wrong, with file and line.
    """
    folder = Path(path)
    name = name or f"{folder.name}/{split}"
    judgments = beir_file(folder, f"qrels/{split}.tsv")
    queries, documents = (
        text_table(f"{name} ({file})", [beir_file(folder, f"{file}.jsonl")], Reading(), cache_dir)
        for file in ("queries", "corpus")
    )
    reading = Reading(on_error=on_error)
    reading.check()
    texts = (queries, documents)
    folders = [side.table.folder.name for side in texts]
    key = fingerprint([judgments], kind="beir", reading=reading, texts=folders)

    def read(tally: Tally) -> Iterator[Placed]:
        for judgment in read_judgments(judgments):
            if judgment.grade >= 1:
                row = Row(judgment.query_id, [judgment.document_id], [], [])
                yield Placed(judgments, judgment.number, row)

    table = example_table(name, key, read, on_error=on_error, texts=texts, cache_dir=cache_dir)
    return Records(name, table, texts)


def _reader(
    files: Sequence[DataFile], reading: Reading, kind: Kind, require_negatives: bool
) -> Callable[[Tally], Iterator[Placed]]:
    def parse(record: object) -> Row:
        row = parse_record(record, kind)
        if require_negatives and not row.negatives:
            raise RecordError("no negatives")
        return row

    schema = TEXT_EXAMPLES if kind is TEXTS else ID_EXAMPLES

    def read(tally: Tally) -> Iterator[Placed]:
        return read_records(files, reading, parse, tally, schema)

    return read
