"""Documents that are left out of the ranking of a query. Q queries, K results each."""

import numpy as np
from numpy.typing import NDArray

from sparton.retrieval.indexes.protocols import Found
from sparton.types import RetrievalTask

Rows = NDArray[np.int64]


def own_rows(task: RetrievalTask) -> Rows:
    """Row of the document that has a query's id, or -1; int64 ``[Q]``."""
    row_of = {name: row for row, name in enumerate(task.documents.ids)}
    return np.array([row_of.get(name, -1) for name in task.queries.ids], np.int64)


def excluded_rows(task: RetrievalTask) -> Rows:
    """Rows of the documents that the task excludes, int64 ``[Q, M]``, M the most of a query; -1
    fills up."""
    row_of = {name: row for row, name in enumerate(task.documents.ids)} if task.excluded else {}
    lists = [[row_of[name] for name in task.excluded.get(query, ())] for query in task.queries.ids]
    rows = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int64)
    for query, own in enumerate(lists):
        rows[query, : len(own)] = own
    return rows


def without(found: Found, excluded: Rows, k: int) -> tuple[Rows, NDArray[np.float32]]:
    """Rows and scores ``[Q, k]`` of the best results that are not among ``excluded [Q, M]``, of
    rankings that are k + M deep."""
    scores, rows = found
    if not excluded.shape[1]:
        return rows, scores
    barred = np.array([np.isin(own, out) for own, out in zip(rows, excluded, strict=True)])
    rows, scores = np.where(barred, -1, rows), np.where(barred, np.float32(0), scores)
    order = np.argsort(rows < 0, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)
