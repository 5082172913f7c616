"""Sums and dot products of sparse vectors that are held without their zeros."""

from sparton.kernels.sparse_products.function import column_sums, dot_products, row_sums

__all__ = ["column_sums", "dot_products", "row_sums"]
