"""A share of the training examples as a dev set: never trained on, and judged by its positives."""

import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparton.arguments import ArgumentError
from sparton.datasets.lookup import Records, Rest, Source
from sparton.datasets.mixture import Mixture
from sparton.datasets.permutation import derive_key
from sparton.datasets.texts import hash_texts
from sparton.types import RetrievalTask, TextCollection

_AT_ONCE = 10_000  # examples
_FEW = 50  # queries, below which a mean says little

logger = logging.getLogger(__name__)


class HeldOut(NamedTuple):
    """Training data in two parts.

    Attributes:
        rest: what is trained on.
        data: both parts.
        rows: by source, the numbers of the examples that are held out; int64, ascending.
        seed: of the choice.
    """

    rest: Mixture
    data: Mixture
    rows: dict[str, NDArray[np.int64]]
    seed: int


def hold_out(data: Mixture, *, share: float = 0.02, most: int = 1000, seed: int = 0) -> HeldOut:
    """Part training data so that no query of one part is in the other; of a set of texts, its first
    text counts.

    Which queries are held out follows from their texts and ``seed`` alone: not from the order of
    the files, nor from anything that differs between the runs of a sweep.

    Args:
        data: the sources.
        share: of their examples that is held out, above 0 and at most 0.5.
        most: examples that are held out at most. One query is in any case, with all its examples.
        seed: of the choice.

    Raises:
        ValueError: a share or number out of range, or nothing would be left to train on.
    """
    if not 0 < share <= 0.5:
        raise ArgumentError(
            "{share} of the examples is to be held out: must be above 0 and at most 0.5",
            share=share,
        )
    if most < 1:
        raise ArgumentError("{most} examples are to be held out: must be at least 1", most=most)
    hashes = {
        name: np.concatenate([_hash(queries, seed) for queries in _queries(source)])
        for name, source in data.sources.items()
    }
    bound = _bound(np.concatenate(list(hashes.values())), min(most, round(share * len(data))))
    rows = {name: np.flatnonzero(each <= bound) for name, each in hashes.items()}
    rest: dict[str, Source] = {}
    for name, source in data.sources.items():
        if len(rows[name]) < len(source):
            rest[name] = Rest(source, rows[name].tolist())
    if not rest:
        raise ValueError(
            f"all of the {len(data)} examples have the same query, so none can be held out: give a "
            "dev set, or train without one"
        )
    return HeldOut(data.of(rest), data, rows, seed)


def held_out_task(held: HeldOut, *, documents: int = 5000, name: str = "holdout") -> RetrievalTask:
    """The examples that are held out as a retrieval task.

    The collection is made of their positives, and of positives drawn from all examples until there
    are so many ``documents``, or no more, in an order that tells nothing about the queries: a model
    that scores all documents alike finds what chance would. The positives of all examples of a
    query have grade 1.

    Args:
        held: from :func:`hold_out`.
        documents: size of the collection.
        name: of the task.

    Raises:
        ValueError: a collection of no documents.
    """
    if documents < 1:
        raise ValueError(f"documents={documents} of the held-out collection: must be at least 1")
    numbers: dict[str, int] = {}
    queries: dict[str, list[int]] = {}
    for source, rows in held.rows.items():
        for row in rows.tolist():
            query, positives = _pair(held.data.sources[source], row)
            found = [numbers.setdefault(text, len(numbers)) for text in positives]
            queries.setdefault(query, []).extend(found)
    _fill(numbers, held, documents)
    count, whole = sum(map(len, held.rows.values())), len(held.data)
    logger.info(
        "%s: %d of %d examples are the dev set and are not trained on: %d queries, to be found in "
        "%d documents", name, count, whole, len(queries), len(numbers),
    )  # fmt: skip
    if len(queries) < _FEW:
        logger.warning(
            "%s: a dev set of %d queries tells good models from bad ones only roughly: raise share "
            "and most of what is held out, or hold out nothing and keep the last model",
            name, len(queries),
        )  # fmt: skip
    names = [f"q{number}" for number in range(len(queries))]
    # Neither places nor ids may tell: equal scores are ranked by one or the other.
    places = np.random.default_rng(held.seed).permutation(len(numbers)).tolist()
    texts = sorted(numbers, key=lambda text: places[numbers[text]])
    judged = [{f"d{places[number]}": 1 for number in own} for own in queries.values()]
    return RetrievalTask(
        name,
        TextCollection([f"d{place}" for place in range(len(texts))], texts),
        TextCollection(names, list(queries)),
        dict(zip(names, judged, strict=True)),
    )


def _fill(numbers: dict[str, int], held: HeldOut, documents: int) -> None:
    """Add positives of other examples to a collection."""
    data, bounds = held.data, np.cumsum([len(source) for source in held.data.sources.values()])
    sources = list(data.sources.values())
    generator = np.random.default_rng(held.seed)
    drawn = generator.choice(len(data), min(len(data), 2 * documents), replace=False)
    for place in drawn.tolist():
        if len(numbers) >= documents:
            return
        number = int(np.searchsorted(bounds, place, side="right"))
        row = place - int(bounds[number]) + len(sources[number])
        for text in _pair(sources[number], row)[1][:1]:
            numbers.setdefault(text, len(numbers))


def _pair(source: Source, row: int) -> tuple[str, list[str]]:
    """Query and positives of an example."""
    if isinstance(source, Records):
        return source.judged(row)
    example = source.example(row, 0, 0)
    return example.query, [example.positive]


def _queries(source: Source) -> Iterator[list[str]]:
    """The query of every example, in lists."""
    if isinstance(source, Records):
        yield from source.queries()
        return
    for start in range(0, len(source), _AT_ONCE):
        stop = min(start + _AT_ONCE, len(source))
        yield [source.example(row, 0, 0).query for row in range(start, stop)]


def _hash(queries: list[str], seed: int) -> NDArray[np.uint64]:
    return derive_key(seed, hash_texts(queries).view(np.int64))


def _bound(hashes: NDArray[np.uint64], wanted: int) -> np.uint64:
    """The highest hash that is held out, with as many examples as wanted and one query at least."""
    values, counts = np.unique(hashes, return_counts=True)
    place = int(np.searchsorted(np.cumsum(counts), wanted, side="right"))
    return values[max(place - 1, 0)]
