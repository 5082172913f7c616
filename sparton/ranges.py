"""Consecutive ranges of rows, on the host.

N rows of unequal numbers of entries, one row after the other.
"""

import numpy as np
from numpy.typing import NDArray


def boundaries_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where rows of ``lengths [N]`` entries begin and end, int64 ``[N + 1]``."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def ranges_of(total: int, size: int) -> list[range]:
    """Consecutive ranges of ``size`` that cover ``total`` rows; the last one may be shorter."""
    return [range(start, min(start + size, total)) for start in range(0, total, size)]


def ranges_within(
    boundaries: NDArray[np.int64], most_rows: int, most_entries: int
) -> list[tuple[int, int]]:
    """Consecutive ranges that cover N rows, each within both limits but never empty.

    Args:
        boundaries: int64 ``[N + 1]``, see :func:`boundaries_of`.
    """
    bounds, start, num_rows = [], 0, len(boundaries) - 1
    while start < num_rows:
        fitting = int(np.searchsorted(boundaries, boundaries[start] + most_entries, "right")) - 1
        stop = min(max(fitting, start + 1), start + most_rows, num_rows)
        bounds.append((start, stop))
        start = stop
    return bounds
