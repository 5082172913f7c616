"""Sparse search, BM25, metrics and TREC files."""
