"""Differentiable sums and dot products of sparse vectors.

Q queries, N vectors or documents over V terms, P active entries.

Vectors are held without zeros, and only some of their columns are dense at a time, so that memory
follows the active entries. Gradients reach these entries alone; they are the same as those of dense
vectors wherever a zero passes no gradient on. Where vectors were gathered from several ranks, only
the gradients of this rank's are computed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparton.kernels.dispatch import without_autocast
from sparton.kernels.sparse_products import precise, spans
from sparton.kernels.sparse_products.columns import read_columns, write_entries
from sparton.kernels.sparse_products.precise import left_factor, multiply, product
from sparton.kernels.sparse_products.spans import Span, cut_columns
from sparton.kernels.sparse_vectors import SparseVectors, used_terms


def column_sums(vectors: SparseVectors, weights: Tensor) -> Tensor:
    """``sum_n weights[n] * vectors[n]``.

    Args:
        weights: ``[N]``, of the dtype of the values; gets no gradient.

    Returns:
        ``[V]``; differentiable once, with respect to the values.
    """
    return _ColumnSums.apply(vectors.learning.vectors.values, vectors, weights)


def row_sums(vectors: SparseVectors) -> Tensor:
    """The sum of each vector, ``[N]``; differentiable once, with respect to the values."""
    return _RowSums.apply(vectors.learning.vectors.values, vectors)


def dot_products(queries: SparseVectors, documents: SparseVectors) -> Tensor:
    """Every query with every document, in the accuracy of fp32; see :mod:`.precise`.

    Returns:
        ``[Q, N]``; differentiable once, with respect to the values of either side.

    Raises:
        ValueError: vectors over different numbers of terms.
    """
    _check_widths(queries.width, documents.width)
    learning = (side.learning.vectors.values for side in (queries, documents))
    return _DotProducts.apply(*learning, queries, documents)


def dense_dot_products(queries: Tensor, documents: Tensor) -> Tensor:
    """:func:`dot_products` of vectors held with all entries, ``[Q, V]`` and ``[N, V]``.

    Returns:
        ``[Q, N]``; differentiable once, with respect to all entries.

    Raises:
        ValueError: vectors over different numbers of terms.
    """
    _check_widths(queries.shape[1], documents.shape[1])
    if not precise.in_pieces(queries):
        with without_autocast(queries.device):
            return queries @ documents.T
    return _DenseDotProducts.apply(queries, documents)


class _ColumnSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, vectors: SparseVectors, weights: Tensor) -> Tensor:
        ctx.vectors, ctx.weights = vectors, weights
        all_spans = _all_spans(vectors)
        with without_autocast(values.device):
            parts = [(weights @ read_columns(vectors, span))[: span.width] for span in all_spans]
        return torch.cat(parts) if parts else values.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = ctx.vectors.learning
        entries = torch.empty_like(own.vectors.values)
        for span in _all_spans(own.vectors):
            matrix = ctx.weights[own.rows, None] * gradient[span.first : span.last]
            write_entries(own.vectors, span, matrix, entries)
        return entries, None, None


class _RowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, vectors: SparseVectors) -> Tensor:
        ctx.vectors = vectors
        sums = values.new_zeros(vectors.num_vectors)
        for span in _all_spans(vectors):
            sums += read_columns(vectors, span).sum(1)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = ctx.vectors.learning
        entries = torch.empty_like(own.vectors.values)
        for span in _all_spans(own.vectors):
            matrix = gradient[own.rows, None].expand(-1, span.width)
            write_entries(own.vectors, span, matrix, entries)
        return entries, None


class _DotProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_values: Tensor,
        document_values: Tensor,
        queries: SparseVectors,
        documents: SparseVectors,
    ) -> Tensor:
        scores = queries.values.new_zeros(queries.num_vectors, documents.num_vectors)
        rows, used = max(scores.shape), None
        # A term that only one side has adds nothing to a score, nor to a gradient. To find them the
        # host waits, longer than few columns take.
        if rows * queries.width > spans.ENTRIES:
            used = used_terms(queries) & used_terms(documents)
        ctx.queries, ctx.documents = queries, documents
        ctx.spans = cut_columns(queries.width, rows, used)
        for span in ctx.spans:
            scores += product(read_columns(queries, span), read_columns(documents, span).T)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        sides = ctx.queries, ctx.documents
        need_queries, need_documents, *_ = ctx.needs_input_grad
        return (
            _entries_of_product(gradient, *sides[::-1], ctx.spans) if need_queries else None,
            _entries_of_product(gradient.T, *sides, ctx.spans) if need_documents else None,
            None,
            None,
        )


class _DenseDotProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, documents: Tensor) -> Tensor:
        ctx.save_for_backward(queries, documents)
        return product(queries, documents.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        queries, documents = ctx.saved_tensors
        need_queries, need_documents = ctx.needs_input_grad
        return (
            _columns_of_product(gradient, documents) if need_queries else None,
            _columns_of_product(gradient.T, queries) if need_documents else None,
        )


def _check_widths(queries: int, documents: int) -> None:
    if queries != documents:
        raise ValueError(
            f"queries of {queries} terms and documents of {documents} have no dot product: both "
            "need one vocabulary"
        )


def _all_spans(vectors: SparseVectors) -> list[Span]:
    return cut_columns(vectors.width, vectors.num_vectors)


def _entries_of_product(
    matrix: Tensor, right: SparseVectors, places: SparseVectors, parts: list[Span]
) -> Tensor:
    """``matrix @ right`` at the active entries of the own vectors of ``places`` alone, ``[P]``."""
    own = places.learning
    entries = torch.zeros_like(own.vectors.values)
    left = left_factor(matrix[own.rows])
    for span in parts:
        write_entries(own.vectors, span, multiply(left, read_columns(right, span)), entries)
    return entries


def _columns_of_product(matrix: Tensor, right: Tensor) -> Tensor:
    """``matrix @ right``, some columns at a time."""
    left = left_factor(matrix)
    result = right.new_empty(matrix.shape[0], right.shape[1])
    for span in cut_columns(right.shape[1], right.shape[0]):
        part = right[:, span.first : span.last]
        if missing := span.aligned_width - span.width:
            part = F.pad(part, (0, missing))
        result[:, span.first : span.last] = multiply(left, part)[:, : span.width]
    return result
