"""Parts of scripts/benchmark_training.py: suites, workload, commands, watching, profile."""
