"""One part of the examples at a time: rank, choose, score, write out as JSON lines.

Q examples of a part, N documents of the collection, E positives outside of it.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from sparton.datasets.lookup import Records
from sparton.datasets.texts import TextsByRow
from sparton.datasets.values import shown
from sparton.pipelines.mining.examples import (
    Barred,
    Hashes,
    Item,
    Positives,
    former_negatives,
    hash_text,
    read_items,
)
from sparton.pipelines.mining.miners import Ranker
from sparton.pipelines.mining.pairs import Pairs, Rows, Score, Scores, Teach
from sparton.pipelines.mining.selection import Rule, Windows, choose, ordered, windows
from sparton.representations import Representations

Short = Literal["keep", "pad", "drop", "former"]
PositiveScores = list[list[list[float]]]  # of each teacher, of each example, of its positives


class Output(NamedTuple):
    """How examples are written.

    Attributes:
        short: what becomes of an example with too few negatives. ``pad`` repeats its own in turn,
            as training does when it reads it, and drops an example that has none; ``former``
            leaves one that has none the negatives that it had before.
        ids: write ids; otherwise texts.
        exclude_self: the document with the query's own id is no negative.
    """

    short: Short
    ids: bool
    exclude_self: bool


class Chosen(NamedTuple):
    """Negatives of one example as rows, with each teacher's scores of them and of the positives."""

    rows: list[int]
    scores: list[list[float]]
    positive_scores: list[list[float]]


@dataclass
class Mining:
    """Everything that a part needs.

    Attributes:
        records: the examples.
        positives: of all of them.
        documents: the collection ``[N]``, and the positives outside of it ``[E]`` or nothing.
        hashes: of both, one after the other ``[N + E]``.
        rankers: each ranks the collection, and gives every example negatives of its own.
        teachers: score pairs; where there are none, the rankers' scores count.
        rule, output: what to choose and to write.
    """

    records: Records
    positives: Positives
    documents: Sequence[TextsByRow]
    hashes: Hashes
    rankers: Sequence[Ranker]
    teachers: Sequence[Teach]
    rule: Rule
    output: Output

    def __post_init__(self) -> None:
        self.collection = self.documents[0]
        self._by_hash = np.argsort(self.hashes, kind="stable")
        self._sorted = self.hashes[self._by_hash]
        self._sorted_collection = np.sort(self.hashes[: len(self.collection)])

    def part(self, start: int, stop: int) -> tuple[list[str], Counter[str]]:
        """Lines for the examples ``start : stop``, in order, those of an example by its miners one
        after the other; and what happened to them."""
        items = read_items(self.records, start, stop)
        texts = [item.query for item in items]
        counts: Counter[str] = Counter(examples=len(items))
        teachers = [
            partial(_teach, number, texts, teach(texts), counts)
            for number, teach in enumerate(self.teachers, 1)
        ]
        taught = self._positive_scores(items, teachers)
        barred, own = self.positives.barred(texts), self._own_rows(items)
        depth = self.rule.depth + self._most(barred) + self.output.exclude_self
        mined = []
        for ranker in self.rankers:
            queries, scores, rows = ranker.rank(texts, depth)
            found = windows(self.rule, rows, scores, self.hashes, barred, own)
            positive_scores = taught
            if self.rule.has_margin and not teachers:
                ranked = partial(self._ranked, ranker, queries)
                positive_scores = self._positive_scores(items, [ranked])
            chosen = self._choose(start, found, teachers, positive_scores, counts)
            mined.append(self._lines(start, items, self._settle(chosen, counts)))
        lines = [line for of_example in zip(*mined) for line in of_example if line is not None]
        counts["written"] = len(lines)
        return lines, counts

    def _own_rows(self, items: Sequence[Item]) -> Rows:
        if not self.output.exclude_self or self.records.texts is None:
            return np.full(len(items), -1)
        return self.records.texts[1].find([item.query_id for item in items])

    def _most(self, barred: Barred) -> int:
        """The most documents of the collection that cannot be negatives of a query."""
        ends = (
            np.searchsorted(self._sorted_collection, barred.hashes, side)
            for side in ("right", "left")
        )
        last, first = ends
        return int(np.bincount(barred.queries, last - first).max())

    def _choose(
        self,
        start: int,
        found: Windows,
        teachers: Sequence[Score],
        positive_scores: PositiveScores,
        counts: Counter[str],
    ) -> list[Chosen]:
        owners, rows, scores = self._tried(start, found)

        def score(places: Rows) -> Scores:
            if not teachers:
                return scores[places]
            return teachers[0](self._pairs(owners[places], rows[places]))

        limits = [self.rule.limit(own) for own in positive_scores[0]] if positive_scores else None
        choice = choose(self.rule, found.sizes, limits, score)
        counts["candidates"] += len(rows)
        counts["refused"] += choice.refused
        taken = np.concatenate(choice.places)
        ends = np.cumsum([len(places) for places in choice.places])[:-1]
        pairs = self._pairs(owners[taken], rows[taken])
        others = [np.split(teach(pairs), ends) for teach in teachers[1:]]
        every = [choice.scores, *others] if teachers else []
        return [
            Chosen(
                rows[places].tolist(),
                [own[place].tolist() for own in every],
                [own[place] for own in positive_scores],
            )
            for place, places in enumerate(choice.places)
        ]

    def _tried(self, start: int, found: Windows) -> tuple[Rows, Rows, Scores]:
        """Numbers of the queries, rows and scores of all candidates ``[C]``, in the order in which
        they are tried."""
        begins = np.cumsum(found.sizes) - found.sizes
        orders = [
            begin + ordered(self.rule, size, number)
            for number, (begin, size) in enumerate(zip(begins, found.sizes.tolist()), start)
        ]
        order = np.concatenate(orders)
        owners = np.repeat(np.arange(len(orders)), found.sizes)
        return owners, found.rows[order], found.scores[order]

    def _pairs(self, queries: Rows, rows: Rows) -> Pairs:
        """Pairs of queries and of documents of the collection."""
        return Pairs(queries, rows, lambda: self.collection.take(rows.tolist()).texts)

    def _positive_scores(self, items: Sequence[Item], scorers: Sequence[Score]) -> PositiveScores:
        """The scores that each of these gives every example's positives."""
        texts = [text for item in items for text in item.positives]
        rows = [row for item in items for row in item.positive_rows or [-1] * len(item.positives)]
        sizes = [len(item.positives) for item in items]
        asked, ends = np.repeat(np.arange(len(items)), sizes), np.cumsum(sizes)[:-1]
        pairs = Pairs(asked, np.array(rows, np.int64), lambda: texts)
        return [[own.tolist() for own in np.split(score(pairs), ends)] for score in scorers]

    def _ranked(self, ranker: Ranker, queries: Representations, pairs: Pairs) -> Scores:
        """A miner's own scores of positives, which are all among the documents."""
        return ranker.score(queries, pairs.queries, self._rows(pairs.read()))

    def _rows(self, texts: Sequence[str]) -> Rows:
        """A row of each text among the documents, which all are among them."""
        hashes = np.fromiter(map(hash_text, texts), np.uint64, len(texts))
        return self._by_hash[np.searchsorted(self._sorted, hashes)]

    def _settle(self, chosen: Sequence[Chosen], counts: Counter[str]) -> list[Chosen | None]:
        """What becomes of the examples that lack negatives."""
        settled: list[Chosen | None] = []
        for each in chosen:
            found = len(each.rows)
            counts["negatives"] += found
            counts["short"] += found < self.rule.negatives
            counts["none"] += not found
            if found == self.rule.negatives or self.output.short in ("keep", "former"):
                settled.append(each)
            elif self.output.short == "drop" or not found:
                counts["dropped"] += 1
                settled.append(None)
            else:
                again = [place % found for place in range(self.rule.negatives)]
                scores = [[own[place] for place in again] for own in each.scores]
                settled.append(each._replace(rows=[each.rows[i] for i in again], scores=scores))
        return settled

    def _lines(
        self, start: int, items: Sequence[Item], chosen: Sequence[Chosen | None]
    ) -> list[str | None]:
        """A line of each example, None of those that are dropped."""
        return [
            None
            if each is None
            else json.dumps(self._record(item, each, negatives), ensure_ascii=False) + "\n"
            for item, each, negatives in zip(items, chosen, self._negatives(start, chosen))
        ]

    def _negatives(self, start: int, chosen: Sequence[Chosen | None]) -> Iterator[Sequence[str]]:
        """Ids or texts of the negatives of each example, as they are written."""
        rows = [row for each in chosen if each is not None for row in each.rows]
        if self.output.ids and self.records.texts is not None:
            cells = iter(self.records.texts[1].ids(np.array(rows, np.int64)))
        else:
            cells = iter(self.collection.take(rows).texts)
        for number, each in enumerate(chosen, start):
            if each is not None and not each.rows and self.output.short == "former":
                former = former_negatives(self.records, number)
                yield former.ids if self.output.ids else former.texts
            else:
                yield [next(cells) for _ in (each.rows if each is not None else ())]

    def _record(self, item: Item, chosen: Chosen, negatives: Sequence[str]) -> dict[str, object]:
        if self.output.ids:
            record: dict[str, object] = {
                "query_id": item.query_id,
                "positive_ids": list(item.positive_ids),
                "negative_ids": list(negatives),
            }
        else:
            record = {"query": item.query, "pos": list(item.positives), "neg": list(negatives)}
        if self.teachers:
            record["pos_scores"] = _by_document(chosen.positive_scores)
            record["neg_scores"] = _by_document(chosen.scores)
        return record


def _by_document(scores: list[list[float]]) -> list[float] | list[list[float]]:
    """Each teacher's scores as records have them: a number for each document, or of several
    teachers a list."""
    if len(scores) == 1:
        return [_short(score) for score in scores[0]]
    return [[_short(score) for score in document] for document in zip(*scores)]


def _teach(
    number: int, texts: Sequence[str], score: Score, counts: Counter[str], pairs: Pairs
) -> Scores:
    """What a teacher gives pairs of these queries, counted from 1 among the teachers."""
    counts["teacher_pairs"] += len(pairs.rows)
    scores = score(pairs) if len(pairs.rows) else np.zeros(0, np.float32)
    wrong = pairs.queries[~np.isfinite(scores)]
    if len(wrong):
        raise ValueError(
            f"teacher {number} gave a document of the query {shown(texts[wrong[0]])} a score that "
            "is not finite: run it in fp32"
        )
    return scores


def _short(score: float) -> float:
    """Without digits that fp32 does not have."""
    return float(f"{score:.7g}")
