"""Benchmarks of MaxSim; ``scripts/benchmark_maxsim.py`` is the program.

Q queries, N documents, K documents per query, L tokens, E embedding, H hidden, T packed tokens.
"""
