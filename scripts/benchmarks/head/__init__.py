"""Heads of SPLADE.

N sequences, S tokens of the longest, T packed tokens, D hidden, V vocabulary.
"""
