"""Training examples and collections by number, read from the tables that training reads.

Texts stay in memory-mapped tables. Whether two texts are equal is decided by 64-bit hashes of their
normal forms, so that what is held in memory is 40 bytes per positive and 24 per document; two texts
that share a hash by chance cost a negative and can never make a positive one.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparton.datasets.sources import Records
from sparton.datasets.texts import TextTable

ROWS_AT_ONCE = 4096
Hashes = NDArray[np.uint64]


class Item(NamedTuple):
    """One training example; of a set, the first text is the query, the others its positives.

    The ids are empty where the example was written out as texts.
    """

    query: str
    positives: list[str]
    query_id: str = ""
    positive_ids: Sequence[str] = ()


class Documents(Protocol):
    """Texts by row."""

    def __len__(self) -> int: ...

    def texts(self, rows: Sequence[int]) -> list[str]: ...

    def ids(self, rows: Sequence[int]) -> list[str]:
        """Ids of the rows; of documents without ids, empty texts."""
        ...


def read_items(records: Records, start: int, stop: int) -> list[Item]:
    """Examples ``start : stop``."""
    table = records.table.rows[start:stop]
    queries, positives = (table[name].to_pylist() for name in ("query", "positives"))
    if records.texts is None:
        return [
            Item(query, cells) if query else Item(cells[0], cells[1:])
            for query, cells in zip(queries, positives)
        ]
    query_cells = _cells(records.texts[0], queries)
    cells = iter(_cells(records.texts[1], list(chain.from_iterable(positives))))
    items = []
    for (query_id, query), rows in zip(query_cells, positives):
        own = [next(cells) for _ in rows]
        items.append(Item(query, [text for _, text in own], query_id, [name for name, _ in own]))
    return items


def all_items(records: Records) -> Iterator[Item]:
    for start in range(0, len(records), ROWS_AT_ONCE):
        yield from read_items(records, start, start + ROWS_AT_ONCE)


def hash_text(text: str) -> int:
    """Of the text with single spaces and without case."""
    normal = " ".join(text.split()).casefold()
    return int.from_bytes(hashlib.blake2b(normal.encode(), digest_size=8).digest(), "little")


EMPTY = np.uint64(hash_text(""))


class Positives:
    """Which texts answer which query anywhere in the file.

    Attributes:
        places: int64 ``[P, 2]``, example and place in it of every positive.
        hashes: of every positive, uint64 ``[P]``.
    """

    def __init__(self, records: Records) -> None:
        queries, hashes, places = array("Q"), array("Q"), array("q")
        for number, item in enumerate(all_items(records)):
            query = hash_text(item.query)
            for place, text in enumerate(item.positives):
                queries.append(query)
                hashes.append(hash_text(text))
                places.extend((number, place))
        self.places = np.array(places, np.int64).reshape(-1, 2)
        self.hashes = np.array(hashes, np.uint64)
        by_query = np.array(queries, np.uint64)
        order = np.argsort(by_query, kind="stable")
        self._queries, self._answers = by_query[order], self.hashes[order]

    def barred(self, query: str) -> Hashes:
        """Hashes of what cannot be a negative of ``query``: the positives of all equal queries, the
        query's own text, and empty texts."""
        own = np.uint64(hash_text(query))
        first = np.searchsorted(self._queries, own, side="left")
        last = np.searchsorted(self._queries, own, side="right")
        return np.unique(np.append(self._answers[first:last], [own, EMPTY]))


class TableDocuments:
    """A collection file."""

    def __init__(self, table: TextTable) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def texts(self, rows: Sequence[int]) -> list[str]:
        return [text for _, text in _cells(self.table, rows)]

    def ids(self, rows: Sequence[int]) -> list[str]:
        return [name for name, _ in _cells(self.table, rows)]


class PositiveDocuments:
    """The positives at ``places [N, 2]`` of examples that are written out as texts."""

    def __init__(self, records: Records, places: NDArray[np.int64]) -> None:
        self._records = records
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def texts(self, rows: Sequence[int]) -> list[str]:
        if not len(rows):
            return []
        numbers, places = self._places[rows].T.tolist()
        table = self._records.table.rows[numbers]
        cells = zip(table["query"].to_pylist(), table["positives"].to_pylist(), places)
        return [texts[place] if query else texts[place + 1] for query, texts, place in cells]

    def ids(self, rows: Sequence[int]) -> list[str]:
        return [""] * len(rows)


def hash_documents(documents: Documents) -> Hashes:
    """uint64 ``[N]``."""
    hashes = np.zeros(len(documents), np.uint64)
    for start in range(0, len(documents), ROWS_AT_ONCE):
        rows = range(start, min(start + ROWS_AT_ONCE, len(documents)))
        hashes[start : rows.stop] = [hash_text(text) for text in documents.texts(rows)]
    return hashes


def distinct(positives: Positives, known: Hashes | None = None) -> NDArray[np.int64]:
    """Numbers of the positives that are the first of their text and not among ``known``."""
    first = np.sort(np.unique(positives.hashes, return_index=True)[1])
    return first if known is None else first[~np.isin(positives.hashes[first], known)]


def _cells(table: TextTable, rows: Sequence[int]) -> list[tuple[str, str]]:
    """Id and text of each row."""
    if not len(rows):
        return []
    found = table.table.rows[list(rows)]
    return list(zip(found["id"].to_pylist(), found["text"].to_pylist()))
