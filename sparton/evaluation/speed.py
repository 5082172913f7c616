"""How fast a system answers, and what its index takes."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

WARM_UP_DOCUMENTS = 32
WARM_UP_QUERIES = 3
_LONGEST = 10.0  # seconds


class Latency(NamedTuple):
    """Milliseconds from the text of one query to its ranking, of queries that came one at a time.

    Attributes:
        p50, p95, p99: the median, and what 95 % and 99 % stay below.
        queries: how many were timed.
    """

    p50: float
    p95: float
    p99: float
    queries: int


class Speed(NamedTuple):
    """What a system costs on one task.

    Attributes:
        documents_per_second: of the encoding of the whole collection, tokenisation included; None
            where it was encoded before.
        queries_per_second: of all queries at once, encoding and search together.
        latency: of queries one at a time.
        index_bytes: of the index, on disk or in memory.
    """

    documents_per_second: float | None
    queries_per_second: float
    latency: Latency
    index_bytes: int


def time_queries(answer: Callable[[str], object], texts: Sequence[str], most: int) -> Latency:
    """The latency of ``most`` queries that lie evenly among ``texts``, or of as many as ten seconds
    allow; a few are answered before, untimed.

    Args:
        answer: from the text of a query to its ranking, on the host.
        texts: of the queries, at least one.
        most: at least 1.
    """
    rows = np.linspace(0, len(texts) - 1, min(most, len(texts))).astype(int)
    sample = [texts[row] for row in rows]
    for text in sample[:WARM_UP_QUERIES]:
        answer(text)
    taken: list[float] = []
    for text in sample:
        start = perf_counter()
        answer(text)
        taken.append(perf_counter() - start)
        if sum(taken) > _LONGEST:
            break
    p50, p95, p99 = np.percentile(np.array(taken) * 1000, (50, 95, 99)).tolist()
    return Latency(p50, p95, p99, len(taken))
