"""Sparse vectors, some columns at a time, as a matrix; and back.

N vectors over V terms, P active entries, C columns.
"""

from collections.abc import Iterator

from torch import Tensor

from sparton.packing import sequence_ids
from sparton.sparse_vectors import SparseVectors

# Entries of a matrix of some columns, and how few columns it may have, for many rows.
ENTRIES, COLUMNS = 2**26, 1024
_ALIGNMENT = 16  # columns; rows of 16-bit numbers then begin where tensor cores want them


def spans(width: int, rows: int) -> Iterator[tuple[int, int]]:
    """The columns 0 to V, in parts of which a matrix with so many rows stays small."""
    size = max(ENTRIES // max(rows, 1), COLUMNS)
    size += -size % _ALIGNMENT
    return ((first, min(first + size, width)) for first in range(0, width, size))


def read_columns(vectors: SparseVectors, first: int, last: int) -> Tensor:
    """Columns ``first : last`` of the dense matrix, and of zeros as many as alignment wants;
    ``[N, C]``."""
    places, inside = _places(vectors, first, last)
    width = last - first
    matrix = vectors.values.new_zeros(vectors.num_vectors, width + -width % _ALIGNMENT)
    matrix[places] = vectors.values[inside]
    return matrix


def write_entries(
    vectors: SparseVectors, first: int, last: int, matrix: Tensor, entries: Tensor
) -> None:
    """Take what ``matrix [N, C]``, columns ``first : last`` of a dense one, has at the active
    entries of ``vectors`` over into ``entries [P]``; the inverse of :func:`read_columns`."""
    places, inside = _places(vectors, first, last)
    entries[inside] = matrix[places]


def _places(vectors: SparseVectors, first: int, last: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Row and column in the matrix of each entry that lies there, and which entries do."""
    inside = ((vectors.terms >= first) & (vectors.terms < last)).nonzero().squeeze(1)
    rows = sequence_ids(vectors.bounds, vectors.num_entries)[inside]
    return (rows, vectors.terms[inside] - first), inside
