"""What a mixture draws from: training examples that can be looked up by number."""

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from sparton.datasets.store import StoredTable
from sparton.datasets.texts import Texts
from sparton.digests import texts_digest
from sparton.types import Example

# How a source gives negatives of a query's own; see :func:`sparton.datasets.sources.text_records`.
Negatives = Literal["required", "sample", "none"]


class Source(Protocol):
    """Training examples that can be looked up by number.

    A source may have a text ``content``, a digest of all its examples: a training whose data have
    changed does not go on, then.
    """

    def __len__(self) -> int: ...

    def example(self, index: int, draw: int, num_negatives: int) -> Example:
        """Example ``index`` with ``num_negatives`` negatives, or without any; ``draw``, a random
        integer of 63 bits, chooses among several positives and negatives. A pure function of its
        arguments."""
        ...


class Rest:
    """A source without some of its examples.

    Args:
        source: the whole.
        without: numbers of the examples that are left out, ascending.
    """

    def __init__(self, source: Source, without: Sequence[int]) -> None:
        self.source = source
        self.without = without
        # Of the examples before it that stay, how many there are.
        self._before = [row - place for place, row in enumerate(without)]

    def __len__(self) -> int:
        return len(self.source) - len(self._before)

    @property
    def content(self) -> str | None:
        """The digest of the whole source; which part of it this is, settings say."""
        return getattr(self.source, "content", None)

    def example(self, index: int, draw: int, num_negatives: int) -> Example:
        """The ``index``-th of those that stay."""
        row = index + bisect_right(self._before, index)
        return self.source.example(row, draw, num_negatives)


def whole_of(source: Source) -> Source:
    """The source that another is a part of; itself where it is none."""
    return source.source if isinstance(source, Rest) else source


class Records:
    """Training examples in a memory-mapped table, looked up by number.

    Args:
        name: for messages.
        table: columns query, positives, negatives, scores.
        texts: where the table holds row numbers instead of texts, the texts of queries and of
            documents.
        negatives: whether examples have negatives of their own; "none" for never.
        share: of the teachers' score of the positive, below which negatives were left.
    """

    def __init__(
        self,
        name: str,
        table: StoredTable,
        texts: Texts | None = None,
        negatives: Negatives = "sample",
        share: float | None = None,
    ) -> None:
        self.name = name
        self.table = table
        self.texts = texts
        self.negatives = negatives
        self.share = share

    def __len__(self) -> int:
        return len(self.table.rows)

    @property
    def content(self) -> str:
        """A digest of all records and of their texts, whatever files they come from."""
        tables = [self.table, *(each.table for each in self.texts or ())]
        return texts_digest(table.content for table in tables)

    @property
    def without_negatives(self) -> int:
        """How many examples have no negatives of their own."""
        return len(self) if self.negatives == "none" else self.table.facts["without_negatives"]

    @property
    def scores_pairs(self) -> bool:
        """Whether all records are pairs with a teacher's score and without negatives."""
        facts = self.table.facts
        return bool(facts["scored"]) and facts["without_negatives"] == len(self)

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
        record has enough; otherwise each is taken once before any is taken again. A record without
        negatives gives none. Of a set ``draw`` chooses the query and the positive.
        """
        cell, *lists = self.table.row[index]
        query = cell.as_py()
        positives, negatives, scores = (each.values for each in lists)
        if self.negatives == "none" or not len(negatives):
            num_negatives = 0
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
