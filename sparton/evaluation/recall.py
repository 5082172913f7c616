"""What an approximate index misses of what exact search finds.

Q queries, K results per query.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.representations import Representations
from sparton.retrieval.indexes.documents import Documents
from sparton.retrieval.indexes.exact import exact_index
from sparton.retrieval.indexes.protocols import Found

SAMPLED_QUERIES = 100
DEPTHS = (10, 100)


class ExactRecall(NamedTuple):
    """Which share of the best documents of exact search are among as many best that were found, the
    mean over queries that find any.

    Attributes:
        at_10, at_100: of the 10 and the 100 best; None where fewer were searched for.
        queries: how many were searched exactly.
    """

    at_10: float | None
    at_100: float | None
    queries: int


def recall_of_exact(
    found: Found,
    queries: Representations,
    documents: Representations | Documents,
    device: torch.device | str,
    *,
    k: int,
    rerank_depth: int,
    exclude: NDArray[np.int64] | None,
) -> ExactRecall:
    """Search up to 100 of the queries, which lie evenly among them, exactly, and compare.

    Args:
        found: what an index found for all Q queries, K results each.
        k: how many it was asked for.
        queries, documents: on the host, what it searched with and among.
        device, rerank_depth: see :func:`~sparton.retrieval.indexes.exact.exact_index`.
        exclude: as the index was given it.
    """
    number = min(SAMPLED_QUERIES, queries.num_texts)
    sample = np.linspace(0, queries.num_texts - 1, number).astype(int)
    depths = [depth for depth in DEPTHS if depth <= k]
    shares: dict[int, float] = {}
    if depths:
        best = exact_index(documents, device, rerank_depth=rerank_depth).search(
            queries.take(torch.from_numpy(sample)),
            max(depths),
            exclude=None if exclude is None else exclude[sample],
        )
        shares = {
            depth: _share(found.rows[sample, :depth], best.rows[:, :depth]) for depth in depths
        }
    return ExactRecall(shares.get(10), shares.get(100), number)


def _share(found: NDArray[np.int64], best: NDArray[np.int64]) -> float:
    """Which share of the rows in ``best [Q, K]`` is in ``found [Q, K]``; -1 is none."""
    hits = [np.isin(row[row >= 0], other).mean() for row, other in zip(best, found) if row[0] >= 0]
    return float(np.mean(hits)) if hits else 1.0
