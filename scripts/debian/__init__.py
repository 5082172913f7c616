"""Pairs of a query and what answers it, out of Debian's packages."""
