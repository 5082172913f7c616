"""Benchmarks of attention; ``scripts/benchmark_attention.py`` is the program."""
