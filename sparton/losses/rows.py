"""What losses ask of sparse representations, whether all of their entries are held or the active
ones alone.

B texts (Q queries, N documents), V terms. Results and gradients of the two forms are the same,
except that entries of zero have a gradient in the first: none that ever passes the ReLU.
"""

from torch import Tensor

from sparton.kernels.sparse_products import (
    column_sums,
    dense_dot_products,
    dot_products,
    row_sums,
)
from sparton.kernels.sparse_vectors import SparseVectors, term_counts

Rows = Tensor | SparseVectors  # fp32 [B, V], not negative


def column_means(reps: Rows, kept: Tensor | None = None) -> Tensor:
    """The mean over all texts, ``[V]``; texts outside of ``kept``, bool ``[B]``, count as zeros."""
    if isinstance(reps, Tensor):
        return (reps if kept is None else reps * kept[:, None]).mean(0)
    texts = reps.num_vectors
    weights = reps.values.new_ones(texts) if kept is None else kept.to(reps.values.dtype)
    return column_sums(reps, weights) / texts


def row_totals(reps: Rows) -> Tensor:
    """The sum over the terms of each text, ``[B]``."""
    return reps.sum(1) if isinstance(reps, Tensor) else row_sums(reps)


def active_terms(reps: Rows) -> Tensor:
    """How many terms each text has, int64 ``[B]``."""
    return (reps.detach() > 0).sum(1) if isinstance(reps, Tensor) else reps.lengths


def document_frequency(reps: Rows) -> Tensor:
    """The share of texts that have each term, fp32 ``[V]``."""
    if isinstance(reps, Tensor):
        return (reps.detach() > 0).float().mean(0)
    return term_counts(reps).float() / reps.num_vectors


def dot_scores(queries: Rows, documents: Rows) -> Tensor:
    """The dot product of every query with every document, fp32 ``[Q, N]``.

    Raises:
        TypeError: one side holds all entries, the other does not.
    """
    if isinstance(queries, SparseVectors) and isinstance(documents, SparseVectors):
        return dot_products(queries, documents)
    if isinstance(queries, Tensor) and isinstance(documents, Tensor):
        return dense_dot_products(queries.float(), documents.float())
    raise TypeError("queries and documents must be held alike, with all entries or without zeros")
