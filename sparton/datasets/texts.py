"""Texts by id on disk: a collection of any size, and an index of its ids of 16 bytes per text."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparton.datasets.columns import COLLECTION
from sparton.datasets.files import DataFile
from sparton.datasets.preparation import (
    OnError,
    Origin,
    Placed,
    Reading,
    Tally,
    chunks,
    read_records,
    report,
    write_table,
)
from sparton.datasets.records import parse_text_or_fields
from sparton.datasets.store import TABLE, Facts, StoredTable, fingerprint, stored_table
from sparton.digests import TextsDigest, records_digest
from sparton.types import TextCollection
from sparton.writing import failures_told

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_BATCH = 1000
ID, TEXT = range(2)  # columns
HASHES, ORDER, EMPTY = "hashes.npy", "order.npy", "empty.npy"


class TextsByRow(Protocol):
    """Texts with ids, by row."""

    def __len__(self) -> int: ...

    def take(self, rows: Sequence[int]) -> TextCollection:
        """Ids and texts of the rows, in their order."""
        ...


class TextList:
    """Texts in memory.

    Args:
        texts: by row.
        ids: of the texts; None for their row numbers.

    Raises:
        ValueError: not as many ids as texts.
    """

    def __init__(self, texts: Sequence[str], ids: Sequence[str] | None = None) -> None:
        self._texts = texts
        self._ids = [str(row) for row in range(len(texts))] if ids is None else ids
        if len(self._ids) != len(texts):
            raise ValueError(f"{len(self._ids)} ids for {len(texts)} texts: give each text one")

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def digest(self) -> str:
        """The :func:`~sparton.digests.records_digest` of the ids and texts."""
        return records_digest(self._ids, self._texts)

    def take(self, rows: Sequence[int]) -> TextCollection:
        """Ids and texts of the rows, in their order."""
        return TextCollection([self._ids[row] for row in rows], [self._texts[row] for row in rows])


class TextTable:
    """Texts with ids, looked up by row or by id; nothing of it is kept in memory."""

    def __init__(self, name: str, table: StoredTable) -> None:
        self.name = name
        self.table = table

    def __len__(self) -> int:
        return len(self.table.rows)

    @property
    def digest(self) -> str:
        """The :func:`~sparton.digests.records_digest` of the ids and texts."""
        return self.table.facts["digest"]

    def text(self, row: int) -> str:
        """The text of one row."""
        return self.table.row[row][TEXT].as_py()

    def take(self, rows: Sequence[int]) -> TextCollection:
        """Ids and texts of the rows, in their order."""
        if not len(rows):
            return TextCollection([], [])
        found = self.table.rows[rows if isinstance(rows, range) else list(rows)]
        return TextCollection(found["id"].to_pylist(), found["text"].to_pylist())

    def ids(self, rows: NDArray[np.int64]) -> list[str]:
        """The ids of the rows, in their order."""
        return self.table.rows.data.column("id").take(rows).to_pylist()

    def find(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Row of every id, -1 where there is none; int64 ``[len(ids)]``.

        The hashes narrow the search to one row, whose id is then compared.
        """
        hashes = np.load(self.table.folder / HASHES, mmap_mode="r")
        order = np.load(self.table.folder / ORDER, mmap_mode="r")
        places = np.searchsorted(hashes, hash_texts(ids))
        rows = order[np.minimum(places, len(hashes) - 1)].astype(np.int64)
        rows[np.array([a != b for a, b in zip(ids, self.ids(rows))], bool)] = -1
        return rows

    def empty(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the text of each row is empty; -1 counts as not empty."""
        flags = np.load(self.table.folder / EMPTY, mmap_mode="r")
        return flags[rows] & (rows >= 0)


Texts = tuple[TextTable, TextTable]  # of queries and of documents


def text_table(
    name: str, files: Sequence[DataFile], reading: Reading, cache_dir: str | None = None
) -> TextTable:
    """Prepare the texts of ``files``, once.

    JSON and Parquet records have an id, a text and perhaps a title; lines of TSV are an id and a
    text unless ``reading.columns`` names them.

    Raises:
        ValueError: a malformed record, or an id that occurs twice, with file and line.
    """
    reading.check()
    key = fingerprint(files, kind="texts", reading=reading)

    def read(tally: Tally) -> Iterator[Placed]:
        return read_records(files, reading, parse_text_or_fields, tally, COLLECTION)

    return prepare_texts(name, key, read, reading.on_error, cache_dir)


def prepare_texts(
    name: str,
    key: str,
    read: Callable[[Tally], Iterator[Placed]],
    on_error: OnError,
    cache_dir: str | None = None,
) -> TextTable:
    """Prepare the texts that ``read`` gives, pairs of an id and a text, once.

    Args:
        name: of the texts, for messages.
        key: see :func:`~sparton.datasets.store.fingerprint`.
        read: tells a tally of malformed records, and leaves them out.
        on_error: what the tally does with these.
        cache_dir: see :func:`~sparton.datasets.store.stored_table`.

    Raises:
        ValueError: a malformed record, an id that occurs twice, with its place, or no text.
    """

    def build(folder: Path) -> Facts:
        tally = Tally(on_error)
        hashes: list[NDArray[np.uint64]] = []
        empty: list[NDArray[np.bool_]] = []
        places, digest = _Places([], [], []), TextsDigest()
        batches = _batches(read(tally), hashes, empty, places, digest)
        write_table(folder / TABLE, _schema(), batches)
        if not hashes:
            raise ValueError(f"{name}: there is no text in what was read")
        _write_index(folder, np.concatenate(hashes), places)
        _save(folder / EMPTY, np.concatenate(empty))
        return {**tally.facts(), "digest": str(digest)}

    table = stored_table(name, key, build, cache_dir)
    report(name, len(table.rows), table.facts)
    return TextTable(name, table)


class _Places(NamedTuple):
    """Where the rows of a table were read.

    Attributes:
        files: in order, of which each holds rows.
        starts: the first row of each.
        numbers: of the line of every row; int64, in pieces.
    """

    files: list[Origin]
    starts: list[int]
    numbers: list[NDArray[np.int64]]

    def add(self, placed: Sequence[Placed]) -> None:
        before = ROWS_PER_BATCH * len(self.numbers)
        for row, record in enumerate(placed, start=before):
            if not self.files or record.file is not self.files[-1]:
                self.files.append(record.file)
                self.starts.append(row)
        self.numbers.append(np.array([record.number for record in placed], np.int64))

    def of(self, row: int) -> str:
        """The place of a row, for messages."""
        file = self.files[bisect_right(self.starts, row) - 1]
        return file.place(int(np.concatenate(self.numbers)[row]))


def _schema() -> "pa.Schema":
    import pyarrow as pa

    return pa.schema([("id", pa.string()), ("text", pa.string())])


def _batches(
    records: Iterator[Placed],
    hashes: list[NDArray[np.uint64]],
    empty: list[NDArray[np.bool_]],
    places: _Places,
    digest: TextsDigest,
) -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa

    for placed in chunks(records, ROWS_PER_BATCH):
        ids = [record.value[0] for record in placed]
        texts = [record.value[1] for record in placed]
        for record in placed:
            digest.update(record.value)
        hashes.append(hash_texts(ids))
        empty.append(np.array([not text for text in texts]))
        places.add(placed)
        yield pa.record_batch([pa.array(ids), pa.array(texts)], schema=_schema())


def hash_texts(texts: Sequence[str]) -> NDArray[np.uint64]:
    """Hashes of ids or of other texts, by which they are found and told apart."""
    from pandas.util import hash_array

    return hash_array(np.array(texts, dtype=object), categorize=False)


def _write_index(folder: Path, hashes: NDArray[np.uint64], places: _Places) -> None:
    from datasets import Dataset

    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    for place in np.flatnonzero(hashes[1:] == hashes[:-1]):
        rows = order[place : place + 2].tolist()
        first, second = Dataset.from_file(str(folder / TABLE))[rows]["id"]
        fault = (
            f"the id {first!r} occurs a second time"
            if first == second
            else f"the ids {second!r} and {first!r} have the same hash: rename one"
        )
        raise ValueError(f"{places.of(rows[1])}: {fault}, first at {places.of(rows[0])}")
    _save(folder / HASHES, hashes)
    _save(folder / ORDER, order)


def _save(file: Path, array: NDArray) -> None:
    with failures_told(str(file), file):
        np.save(file, array)
