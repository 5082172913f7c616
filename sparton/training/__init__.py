"""The training loop, its exact step on the global batch, and what it writes."""
