"""Scores of pairs of a query and a document, as teachers give them.

Q queries of a part of the examples, N documents of the collection, P pairs.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.datasets.texts import TextsByRow
from sparton.embeddings import KeyRows, text_keys
from sparton.pipelines.mining.examples import texts_of
from sparton.representations import Representations
from sparton.retrieval.indexes.exact import score_pairs

Rows = NDArray[np.int64]
Scores = NDArray[np.float32]
Encode = Callable[..., Representations]


class Pairs(NamedTuple):
    """P pairs.

    Attributes:
        queries: of the Q queries the number of each, int64 ``[P]``.
        rows: of the N documents the row of each, int64 ``[P]``; -1 where it is not known, or the
            document is none of them.
        read: gives the texts of the documents ``[P]``.
    """

    queries: Rows
    rows: Rows
    read: Callable[[], Sequence[str]]


Score = Callable[[Pairs], Scores]
# Of Q queries, what scores pairs of these.
Teach = Callable[[Sequence[str]], Score]


class HeldDocuments:
    """The documents of a collection as an encoder made them before.

    Args:
        documents: their texts.
        slabs: what they became, in order.
    """

    def __init__(self, documents: TextsByRow, slabs: Sequence[Representations]) -> None:
        self._documents, self._slabs = documents, slabs
        self._starts = np.cumsum([0, *(slab.num_texts for slab in slabs)])

    @cached_property
    def _rows(self) -> KeyRows:
        return KeyRows.of(text_keys(texts_of([self._documents])), 0)

    def find(self, texts: Sequence[str]) -> Rows:
        """The row of each text, -1 of those that the collection lacks."""
        return self._rows.find(text_keys(texts))

    def take(self, rows: Rows) -> Representations:
        """The documents of ``rows``, at least one, in ascending order."""
        bounds = np.searchsorted(rows, self._starts)
        return Representations.concatenate(
            [
                slab.take(torch.from_numpy(rows[first:last] - start))
                for slab, start, first, last in zip(self._slabs, self._starts, bounds, bounds[1:])
                if first < last
            ]
        )


class Similarities:
    """Scores pairs by what an encoder makes of their texts; a :data:`Teach`.

    A query of a part is encoded once, whatever it is compared with.

    Args:
        queries, documents: encode texts.
        device: where vectors are compared.
        held: documents that were encoded before; None where each is encoded when it is asked for.
    """

    def __init__(
        self,
        queries: Encode,
        documents: Encode,
        device: torch.device,
        held: HeldDocuments | None = None,
    ) -> None:
        self._encode_queries, self._encode = queries, documents
        self._device, self._held = device, held

    def __call__(self, queries: Sequence[str]) -> Score:
        texts, places = _distinct(queries)
        return partial(self._score, self._encode_queries(texts), places)

    def _score(self, queries: Representations, places: Rows, pairs: Pairs) -> Scores:
        rows, asked = self._rows(pairs), places[pairs.queries]
        scores = np.zeros(len(rows), np.float32)
        held, others = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
        if self._held is not None and held.size:
            take = self._held.take
            scores[held] = score_rows(queries, take, asked[held], rows[held], self._device)
        if others.size:
            texts = pairs.read()
            distinct, numbers = _distinct([texts[place] for place in others.tolist()])
            own = np.stack([asked[others], numbers], 1)
            scores[others] = score_pairs(queries, self._encode(distinct), own, self._device)
        return scores

    def _rows(self, pairs: Pairs) -> Rows:
        """The rows of the documents that are held, -1 for others."""
        if self._held is None:
            return np.full(len(pairs.rows), -1)
        return pairs.rows if (pairs.rows >= 0).all() else self._held.find(pairs.read())


def score_rows(
    queries: Representations,
    take: Callable[[Rows], Representations],
    asked: Rows,
    rows: Rows,
    device: torch.device,
) -> Scores:
    """Scores fp32 ``[P]`` of queries and rows of documents, of which no others are touched.

    Args:
        queries: encoded.
        take: gives documents by ascending rows.
        asked: numbers of queries, int64 ``[P]``.
        rows: int64 ``[P]``.
        device: where vectors are compared.
    """
    distinct, numbers = np.unique(rows, return_inverse=True)
    return score_pairs(queries, take(distinct), np.stack([asked, numbers], 1), device)


def _distinct(texts: Sequence[str]) -> tuple[list[str], Rows]:
    """The different ones among texts, and for each text its number among them."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return list(numbers), np.array([numbers[text] for text in texts], np.int64)
