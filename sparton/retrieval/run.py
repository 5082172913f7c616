"""A run: what a system retrieved. Q queries, K results each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Run(NamedTuple):
    """Rankings of documents, best first.

    Attributes:
        query_ids: Q identifiers.
        document_ids: identifiers that ``rows`` points into, usually a whole collection's.
        rows: int ``[Q, K]``, positions in ``document_ids``; -1 in slots that nothing fills,
            which come after all results.
        scores: fp32 ``[Q, K]``, not increasing along a row.
    """

    query_ids: Sequence[str]
    document_ids: Sequence[str]
    rows: NDArray[np.int64]
    scores: NDArray[np.float32]

    @classmethod
    def from_scores(cls, scores: Mapping[str, Mapping[str, float]]) -> "Run":
        """From query id to document id to score; equal scores keep the order they come in."""
        document_ids = list(dict.fromkeys(name for ranking in scores.values() for name in ranking))
        row_of = {name: row for row, name in enumerate(document_ids)}
        depth = max((len(ranking) for ranking in scores.values()), default=0)
        run = cls(
            list(scores),
            document_ids,
            np.full((len(scores), depth), -1, np.int64),
            np.zeros((len(scores), depth), np.float32),
        )
        for query, ranking in enumerate(scores.values()):
            ordered = sorted(ranking.items(), key=lambda item: -item[1])
            run.rows[query, : len(ordered)] = [row_of[name] for name, _ in ordered]
            run.scores[query, : len(ordered)] = [score for _, score in ordered]
        return run

    def ties_by_id(self) -> "Run":
        """The same results, where equal scores come in the order of trec_eval: by the ids of their
        documents, the last of the alphabet first. Among them, the order of the collection decides
        nothing."""
        found = self.rows >= 0
        ties = (self.scores[:, 1:] == self.scores[:, :-1]) & found[:, 1:]
        queries = ties.any(axis=1).nonzero()[0]
        if not len(queries):
            return self
        rows, scores, found = self.rows[queries], self.scores[queries], found[queries]
        several = np.unique(rows[found])
        names = [self.document_ids[row] for row in several.tolist()]
        by_name = sorted(range(len(names)), key=names.__getitem__)
        rank = np.empty(len(several), np.int64)
        rank[by_name] = np.arange(len(several))
        order = np.lexsort((-rank[np.searchsorted(several, rows)], -scores, ~found))
        run = self._replace(rows=self.rows.copy(), scores=self.scores.copy())
        run.rows[queries] = np.take_along_axis(rows, order, axis=1)
        run.scores[queries] = np.take_along_axis(scores, order, axis=1)
        return run

    def rankings(self) -> Iterator[tuple[str, list[tuple[str, float]]]]:
        """Each query's id with its (document id, score) pairs, best first."""
        for query_id, rows, scores in zip(self.query_ids, self.rows, self.scores, strict=True):
            found = rows >= 0
            names = [self.document_ids[row] for row in rows[found].tolist()]
            yield query_id, list(zip(names, scores[found].tolist(), strict=True))
