"""Builders of the published tables; ``scripts/make_tables.py`` places them."""
