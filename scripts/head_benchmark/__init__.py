"""Benchmarks of the SPLADE heads; ``scripts/benchmark_head.py`` is the program.

N sequences, S tokens of the longest, T packed tokens, D hidden, V vocabulary.
"""
