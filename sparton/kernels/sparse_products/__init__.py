"""Sums and dot products of representations, most of whose entries are zero."""

from sparton.kernels.sparse_products.function import (
    column_sums,
    dense_dot_products,
    dot_products,
    row_sums,
)

__all__ = ["column_sums", "dense_dot_products", "dot_products", "row_sums"]
