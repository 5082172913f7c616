"""Training rows to Arrow: texts as they are, or ids as row numbers of the tables of texts.

R rows of a batch, F documents of all of them together.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sparton.datasets.files import DataFile
from sparton.datasets.preparation import OnError, Placed, Tally, chunks, report, write_table
from sparton.datasets.store import TABLE, Facts, StoredTable, stored_table
from sparton.datasets.texts import Texts

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_ROWS_PER_BATCH = 1000
ID_ROWS_PER_BATCH = 20_000


def example_table(
    name: str,
    key: str,
    read: Callable[[Tally], Iterator[Placed]],
    *,
    on_error: OnError,
    files: Sequence[DataFile] = (),
    texts: Texts | None = None,
    cache_dir: str | None = None,
) -> StoredTable:
    """The table of a source with the columns query, positives, negatives, scores, built once.

    Its facts tell whether the records have teacher scores, how many have no negatives, and which
    is the first of these.

    Args:
        name: of the source, for messages.
        key: from :func:`sparton.datasets.store.fingerprint`.
        read: gives the rows.
        on_error: stop at a record that does not fit, or skip and count it.
        files: that the rows come from, for messages.
        texts: of queries and documents where the records hold ids.
        cache_dir: by default the cache of `datasets`.

    Raises:
        ValueError: a malformed record, an unknown id, or no record at all.
    """

    def build(folder: Path) -> Facts:
        tally = Tally(on_error)
        facts: Facts = {"scored": None, "teachers": None}
        facts |= {"without_negatives": 0, "first_without_negatives": None, "repeated": 0}
        records = read(tally) if texts is None else _resolved(read(tally), texts, tally)
        batches = _batches(_watched(records, tally, facts), texts is not None, facts)
        write_table(folder / TABLE, _schema(texts is not None), batches)
        if facts["scored"] is None:
            places = f" in {files[0].name}" if files else ""
            places += f" and {len(files) - 1} more" if files[1:] else ""
            faults = "".join(f"; {fault}" for fault in tally.first_skipped)
            raise ValueError(f"{name}: no usable record{places}{faults}")
        return {**tally.facts(), **facts}

    table = stored_table(name, key, build, cache_dir)
    report(name, len(table.rows), table.facts)
    return table


def _watched(records: Iterator[Placed], tally: Tally, facts: Facts) -> Iterator[Placed]:
    for placed in records:
        scored, teachers = bool(placed.value.scores), placed.value.teachers
        if facts["scored"] is None:
            facts["scored"], facts["teachers"] = scored, teachers
        if scored != facts["scored"]:
            earlier = "have some" if facts["scored"] else "have none"
            state = "teacher scores" if scored else "no teacher scores"
            tally.reject(placed.place, f"{state}, but the records before {earlier}")
            continue
        if teachers != facts["teachers"]:
            tally.reject(
                placed.place,
                f"scores of {teachers} teachers, but the records before have {facts['teachers']}",
            )
            continue
        facts["repeated"] += placed.value.repeated
        if not placed.value.negatives and facts["first_without_negatives"] is None:
            facts["first_without_negatives"] = placed.place
        yield placed


def _schema(ids: bool) -> "pa.Schema":
    import pyarrow as pa

    cell = pa.int64() if ids else pa.string()
    return pa.schema(
        [
            ("query", cell),
            ("positives", pa.list_(cell)),
            ("negatives", pa.list_(cell)),
            ("scores", pa.list_(pa.float32())),
        ]
    )


def _batches(records: Iterator[Placed], ids: bool, facts: Facts) -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa

    schema = _schema(ids)
    for chunk in chunks(records, ID_ROWS_PER_BATCH if ids else TEXT_ROWS_PER_BATCH):
        rows = [placed.value for placed in chunk]
        facts["without_negatives"] += sum(not negatives for _, _, negatives, *_ in rows)
        columns = [pa.array(cells, entry.type) for cells, entry in zip(zip(*rows), schema)]
        yield pa.record_batch(columns, schema=schema)


def _resolved(records: Iterator[Placed], texts: Texts, tally: Tally) -> Iterator[Placed]:
    """Records with ids replaced by row numbers, without those that have an unknown or empty
    text."""
    for chunk in chunks(records, ID_ROWS_PER_BATCH):
        yield from _resolve(chunk, texts, tally)


def _resolve(chunk: Sequence[Placed], texts: Texts, tally: Tally) -> Iterator[Placed]:
    query_table, document_table = texts
    rows = [placed.value for placed in chunk]
    flat = [each for row in rows for each in (*row.positives, *row.negatives)]
    queries = query_table.find([row.query for row in rows])
    documents = document_table.find(flat)
    bad_queries = (queries < 0) | query_table.empty(queries)
    bad_documents = (documents < 0) | document_table.empty(documents)
    start = 0
    for number, row in enumerate(rows):
        middle, stop = start + len(row.positives), start + len(row.positives) + len(row.negatives)
        if bad_queries[number]:
            tally.reject(chunk[number].place, _fault("query", row.query, queries[number]))
        elif bad_documents[start:stop].any():
            bad = start + int(bad_documents[start:stop].argmax())
            tally.reject(chunk[number].place, _fault("document", flat[bad], documents[bad]))
        else:
            found = row._replace(
                query=int(queries[number]),
                positives=documents[start:middle].tolist(),
                negatives=documents[middle:stop].tolist(),
            )
            yield chunk[number]._replace(value=found)
        start = stop


def _fault(part: str, identifier: str, row: NDArray[np.int64]) -> str:
    if row < 0:
        return f"the {part} id {identifier!r} is not in the file of texts"
    return f"the text of {part} {identifier!r} is empty"
