"""Exact search over sparse vectors, ours and what it replaced."""
