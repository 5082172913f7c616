"""One part of the examples at a time: rank, choose, score, write out as JSON lines.

Q examples of a part, N documents of the collection, E positives outside of it.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from sparton.datasets.lookup import Records
from sparton.datasets.texts import TextsByRow
from sparton.pipelines.mining.examples import (
    Hashes,
    Item,
    Positives,
    former_negatives,
    hash_text,
    read_items,
)
from sparton.pipelines.mining.miners import Pairs, Ranker, Score
from sparton.pipelines.mining.selection import Rule, Scores, choose, ordered, window
from sparton.representations import Representations

Short = Literal["keep", "pad", "drop", "former"]


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
        ranker: ranks the collection.
        teachers: score pairs; where there are none, the ranker's scores count.
        rule, output: what to choose and to write.
    """

    records: Records
    positives: Positives
    documents: Sequence[TextsByRow]
    hashes: Hashes
    ranker: Ranker
    teachers: Sequence[Score]
    rule: Rule
    output: Output

    def __post_init__(self) -> None:
        self.collection = self.documents[0]
        self._by_hash = np.argsort(self.hashes, kind="stable")
        self._sorted = self.hashes[self._by_hash]
        self._sorted_collection = np.sort(self.hashes[: len(self.collection)])

    def part(self, start: int, stop: int) -> tuple[list[str], Counter[str]]:
        """Lines for the examples ``start : stop``, in order, and what happened to them."""
        items = read_items(self.records, start, stop)
        barred = [self.positives.barred(item.query) for item in items]
        own = self._own_rows(items)
        depth = self.rule.depth + max(map(self._count, barred)) + self.output.exclude_self
        queries, scores, rows = self.ranker.rank([item.query for item in items], depth)
        windows = [
            window(self.rule, rows[place], scores[place], self.hashes, barred[place], own[place])
            for place in range(len(items))
        ]
        counts: Counter[str] = Counter(examples=len(items))
        chosen = self._choose(start, items, windows, queries, counts)
        lines = [
            json.dumps(self._record(number, item, each), ensure_ascii=False) + "\n"
            for number, item, each in zip(range(start, stop), items, self._settle(chosen, counts))
            if each is not None
        ]
        counts["written"] = len(lines)
        return lines, counts

    def _own_rows(self, items: Sequence[Item]) -> Sequence[int]:
        if not self.output.exclude_self or self.records.texts is None:
            return [-1] * len(items)
        return self.records.texts[1].find([item.query_id for item in items]).tolist()

    def _count(self, barred: Hashes) -> int:
        """Number of documents of the collection with one of these hashes."""
        ends = (
            np.searchsorted(self._sorted_collection, barred, side) for side in ("right", "left")
        )
        last, first = ends
        return int((last - first).sum())

    def _choose(
        self,
        start: int,
        items: Sequence[Item],
        windows: Sequence[tuple[np.ndarray, Scores]],
        queries: Representations,
        counts: Counter[str],
    ) -> list[Chosen]:
        orders = [
            ordered(self.rule, len(rows), start + place) for place, (rows, _) in enumerate(windows)
        ]
        by_miner = [dict(zip(rows.tolist(), scores)) for rows, scores in windows]

        def score(pairs: Sequence[tuple[int, int]]) -> Scores:
            if not self.teachers:
                return np.array([by_miner[query][row] for query, row in pairs], np.float32)
            return _teach(self.teachers[0], self._texts(items, pairs), counts)

        positive_scores = self._positive_scores(items, queries, counts)
        limits = [self.rule.limit(own) if own else np.inf for own in positive_scores]
        candidates = [rows[order] for (rows, _), order in zip(windows, orders)]
        choice = choose(self.rule, candidates, limits, score)
        counts["candidates"] += sum(map(len, candidates))
        counts["refused"] += choice.refused
        if not self.teachers:
            return [Chosen(rows, [], []) for rows in choice.rows]
        chosen = [
            Chosen(rows, [own], [best])
            for rows, own, best in zip(choice.rows, choice.scores, positive_scores)
        ]
        taken = [(place, row) for place, rows in enumerate(choice.rows) for row in rows]
        for teacher in self.teachers[1:]:
            scores = iter(_teach(teacher, self._texts(items, taken), counts).tolist())
            positives = self._taught_positives(teacher, items, counts)
            for each, own in zip(chosen, positives):
                each.scores.append([next(scores) for _ in each.rows])
                each.positive_scores.append(own)
        return chosen

    def _texts(self, items: Sequence[Item], pairs: Sequence[tuple[int, int]]) -> Pairs:
        """The texts of (number of an example, row of a document)."""
        texts = self.collection.take([row for _, row in pairs]).texts
        return [(items[place].query, text) for (place, _), text in zip(pairs, texts)]

    def _positive_scores(
        self, items: Sequence[Item], queries: Representations, counts: Counter[str]
    ) -> list[list[float]]:
        """By the first teacher if there is one, else by the miner; nothing if nobody asks for
        them."""
        if self.teachers:
            return self._taught_positives(self.teachers[0], items, counts)
        if not self.rule.has_margin:
            return [[] for _ in items]
        return [
            self.ranker.score(queries, place, [self._row(text) for text in item.positives])
            for place, item in enumerate(items)
        ]

    def _taught_positives(
        self, teacher: Score, items: Sequence[Item], counts: Counter[str]
    ) -> list[list[float]]:
        pairs = [(item.query, text) for item in items for text in item.positives]
        scores = iter(_teach(teacher, pairs, counts).tolist())
        return [[next(scores) for _ in item.positives] for item in items]

    def _row(self, text: str) -> int:
        return int(self._by_hash[np.searchsorted(self._sorted, np.uint64(hash_text(text)))])

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

    def _record(self, number: int, item: Item, chosen: Chosen) -> dict[str, object]:
        if chosen.rows or self.output.short != "former":
            negatives = self.collection.take(chosen.rows)
        else:
            negatives = former_negatives(self.records, number)
        if self.output.ids:
            record: dict[str, object] = {
                "query_id": item.query_id,
                "positive_ids": list(item.positive_ids),
                "negative_ids": list(negatives.ids),
            }
        else:
            record = {
                "query": item.query,
                "pos": list(item.positives),
                "neg": list(negatives.texts),
            }
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


def _teach(teacher: Score, pairs: Pairs, counts: Counter[str]) -> Scores:
    counts["teacher_pairs"] += len(pairs)
    scores = teacher(pairs) if pairs else np.zeros(0, np.float32)
    if not np.isfinite(scores).all():
        raise ValueError("the teacher gave a score that is not finite: run it in fp32")
    return scores


def _short(score: float) -> float:
    """Without digits that fp32 does not have."""
    return float(f"{score:.7g}")
