"""What benchmark_data.py measures, and how."""
