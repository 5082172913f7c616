"""Training examples and collections by number, read from the tables that training reads.

Texts stay in memory-mapped tables. Whether two texts are equal is decided by 64-bit hashes of their
normal forms, so that what is held in memory is 40 bytes per positive and 24 per document; two texts
that share a hash by chance cost a negative and can never make a positive one.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparton.datasets.lookup import Records
from sparton.datasets.texts import TextsByRow
from sparton.packing import ranges_of
from sparton.types import TextCollection

ROWS_AT_ONCE = 4096
Hashes = NDArray[np.uint64]


class Item(NamedTuple):
    """One training example; of a set, the first text is the query, the others its positives.

    The ids are empty where the example was written out as texts, and so are the rows of its
    positives in the collection.
    """

    query: str
    positives: Sequence[str]
    query_id: str = ""
    positive_ids: Sequence[str] = ()
    positive_rows: Sequence[int] = ()


def read_items(records: Records, start: int, stop: int) -> list[Item]:
    """Examples ``start : stop``."""
    table = records.table.rows[start:stop]
    queries, positives = (table[name].to_pylist() for name in ("query", "positives"))
    if records.texts is None:
        return [
            Item(query, cells) if query else Item(cells[0], cells[1:])
            for query, cells in zip(queries, positives)
        ]
    asked = records.texts[0].take(queries)
    answers = records.texts[1].take(list(chain.from_iterable(positives)))
    bounds = [0, *accumulate(map(len, positives))]
    return [
        Item(query, answers.texts[first:last], query_id, answers.ids[first:last], rows)
        for query_id, query, rows, first, last in zip(*asked, positives, bounds, bounds[1:])
    ]


def all_items(records: Records) -> Iterator[Item]:
    for rows in ranges_of(len(records), ROWS_AT_ONCE):
        yield from read_items(records, rows.start, rows.stop)


def former_negatives(records: Records, number: int) -> TextCollection:
    """The negatives that an example has; their ids are empty where it was written out as texts."""
    cells = records.table.row[number][2].as_py()
    if records.texts is None:
        return TextCollection([""] * len(cells), cells)
    return records.texts[1].take(cells)


def hash_text(text: str) -> int:
    """The hash of the text with single spaces and without case."""
    normal = " ".join(text.split()).casefold()
    return int.from_bytes(hashlib.blake2b(normal.encode(), digest_size=8).digest(), "little")


EMPTY = np.uint64(hash_text(""))
_ODD = np.uint64(0x9E3779B97F4A7C15)  # spreads small numbers over 64 bits


class Barred(NamedTuple):
    """Texts that cannot be negatives of Q queries, no text of a query twice.

    Attributes:
        queries: numbers of queries, int64 ``[B]``.
        hashes: of texts, uint64 ``[B]``.
    """

    queries: NDArray[np.int64]
    hashes: Hashes


def keys_of(queries: NDArray[np.int64], hashes: Hashes) -> Hashes:
    """64-bit hashes of pairs, the number of a query and the hash of a text, which broadcast."""
    return hashes ^ (queries.astype(np.uint64) * _ODD)


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

    def barred(self, queries: Sequence[str]) -> Barred:
        """What cannot be a negative of each of Q queries: the positives of all equal queries, the
        query's own text, and empty texts."""
        own = np.fromiter(map(hash_text, queries), np.uint64, len(queries))
        first, last = (np.searchsorted(self._queries, own, side) for side in ("left", "right"))
        every = np.arange(len(queries))
        of = np.concatenate([np.repeat(every, last - first), every, every])
        hashes = np.concatenate(
            [self._answers[ranges(first, last)], own, np.full(len(queries), EMPTY)]
        )
        once = np.unique(keys_of(of, hashes), return_index=True)[1]
        return Barred(of[once], hashes[once])


def ranges(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers from each start to before its stop, end to end."""
    lengths = stops - starts
    return np.arange(lengths.sum()) + np.repeat(stops - np.cumsum(lengths), lengths)


class PositiveDocuments:
    """The positives at ``places [N, 2]`` of examples that are written out as texts."""

    def __init__(self, records: Records, places: NDArray[np.int64]) -> None:
        self._records = records
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def take(self, rows: Sequence[int]) -> TextCollection:
        """The texts of the rows, in their order; their ids are empty."""
        if not len(rows):
            return TextCollection([], [])
        numbers, places = self._places[list(rows)].T.tolist()
        table = self._records.table.rows[numbers]
        cells = zip(table["query"].to_pylist(), table["positives"].to_pylist(), places)
        texts = [texts[place] if query else texts[place + 1] for query, texts, place in cells]
        return TextCollection([""] * len(texts), texts)


def texts_of(parts: Sequence[TextsByRow]) -> Iterator[str]:
    """All texts, one part after the other."""
    for part in parts:
        for rows in ranges_of(len(part), ROWS_AT_ONCE):
            yield from part.take(rows).texts


def hash_documents(documents: TextsByRow) -> Hashes:
    """The hashes of the texts of all documents; uint64 ``[N]``."""
    return np.fromiter(map(hash_text, texts_of([documents])), np.uint64, len(documents))


def distinct(positives: Positives, known: Hashes | None = None) -> NDArray[np.int64]:
    """Numbers of the positives that are the first of their text and not among ``known``."""
    first = np.sort(np.unique(positives.hashes, return_index=True)[1])
    return first if known is None else first[~np.isin(positives.hashes[first], known)]
