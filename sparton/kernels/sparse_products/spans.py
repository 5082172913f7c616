"""Which columns are computed at a time, where not all are.

V terms.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.sparse_products.precise import ALIGNMENT

# Entries of a matrix of some columns, and how few columns it may have, for many rows.
ENTRIES, COLUMNS = 2**26, 1024


class Span(NamedTuple):
    """Some of the columns that are computed, which stand for all terms or for some.

    Attributes:
        first, last: the terms from ``first`` to ``last``, excluding it, are these columns.
        column: number of the first column among all that are computed.
        width: how many columns.
        numbers: int32 ``[V]``, each term's number among the columns, or -1; None where all terms
            are columns.
    """

    first: int
    last: int
    column: int
    width: int
    numbers: Tensor | None = None

    @property
    def aligned_width(self) -> int:
        return self.width + -self.width % ALIGNMENT


def cut_columns(num_terms: int, num_rows: int, used: Tensor | None = None) -> list[Span]:
    """All columns, in parts of which a matrix with so many rows stays small.

    Args:
        used: bool ``[V]``, the terms to compute; the host waits for it. None for all.
    """
    size = max(ENTRIES // max(num_rows, 1), COLUMNS)
    size += -size % ALIGNMENT
    numbers, firsts, total = None, list(range(0, num_terms, size)), num_terms
    if used is not None and len(places := used.nonzero().squeeze(1)) < num_terms:
        numbers = torch.where(used, used.cumsum(0) - 1, -1).int()
        firsts, total = places[::size].tolist(), len(places)
    bounds = pairwise([*firsts, num_terms])
    return [
        Span(first, last, row * size, min(size, total - row * size), numbers)
        for row, (first, last) in enumerate(bounds)
    ]
