"""Sparse vectors, some columns at a time, as a matrix; and back.

N vectors over V terms, P active entries, C columns. Triton is imported when the first CUDA tensor
arrives.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sparton.packing import sequence_ids
from sparton.sparse_vectors import SparseVectors

# Entries of a matrix of some columns, and how few columns it may have, for many rows.
ENTRIES, COLUMNS = 2**26, 1024
_ALIGNMENT = 16  # columns; rows of 16-bit numbers then begin where tensor cores want them


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
        return self.width + -self.width % _ALIGNMENT


def spans(num_terms: int, num_rows: int, used: Tensor | None = None) -> list[Span]:
    """All columns, in parts of which a matrix with so many rows stays small.

    Args:
        used: bool ``[V]``, the terms to compute; the host waits for it. None for all.
    """
    size = max(ENTRIES // max(num_rows, 1), COLUMNS)
    size += -size % _ALIGNMENT
    numbers, firsts, total = None, list(range(0, num_terms, size)), num_terms
    if used is not None and (total := int(used.sum())) < num_terms:
        numbers = torch.where(used, used.cumsum(0) - 1, -1).int()
        firsts = used.nonzero().squeeze(1)[::size].tolist()
    bounds = pairwise([*firsts, num_terms])
    return [
        Span(first, last, row * size, min(size, total - row * size), numbers)
        for row, (first, last) in enumerate(bounds)
    ]


def read_columns(vectors: SparseVectors, span: Span) -> Tensor:
    """Columns of the dense matrix, and zeros up to the aligned width; ``[N, C]``."""
    matrix = vectors.values.new_zeros(vectors.num_vectors, span.aligned_width)
    if matrix.is_cuda:
        from sparton.kernels.sparse_products.kernels import copy_entries

        copy_entries(vectors.values, vectors, span, matrix, to_matrix=True)
        return matrix
    places, inside = _places(vectors, span)
    matrix[places] = vectors.values[inside]
    return matrix


def write_entries(vectors: SparseVectors, span: Span, matrix: Tensor, entries: Tensor) -> None:
    """Take what ``matrix [N, C]`` has at the active entries of ``vectors`` over into ``entries
    [P]``; the inverse of :func:`read_columns`."""
    if matrix.is_cuda:
        from sparton.kernels.sparse_products.kernels import copy_entries

        copy_entries(entries, vectors, span, matrix, to_matrix=False)
        return
    places, inside = _places(vectors, span)
    entries[inside] = matrix[places]


def _places(vectors: SparseVectors, span: Span) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Row and column in the matrix of each entry that lies there, and which entries do."""
    numbers = vectors.terms.long()
    inside = (numbers >= span.first) & (numbers < span.last)
    if span.numbers is not None:
        numbers = span.numbers[numbers].long()
        inside &= numbers >= 0
    rows = sequence_ids(vectors.bounds, vectors.num_entries)
    return (rows[inside], numbers[inside] - span.column), inside
