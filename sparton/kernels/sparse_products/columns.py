"""Sparse vectors, some columns at a time, as a matrix; and back.

N vectors over V terms, P active entries, C columns. Triton is imported when the first CUDA tensor
arrives.
"""

from torch import Tensor

from sparton.kernels.boundaries import sequence_ids
from sparton.kernels.sparse_products.spans import Span
from sparton.kernels.sparse_vectors import SparseVectors


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
    rows = sequence_ids(vectors.cu_seqlens, vectors.num_entries)
    return (rows[inside], numbers[inside] - span.column), inside
