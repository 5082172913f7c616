"""Indexes: documents that were encoded and can be searched."""
