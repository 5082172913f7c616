"""Exact search over sparse documents by their inverted index."""

from sparton.kernels.sparse_search.building import invert
from sparton.kernels.sparse_search.function import search_postings
from sparton.kernels.sparse_search.postings import Postings

__all__ = ["Postings", "invert", "search_postings"]
