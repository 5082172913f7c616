"""Attention over packed sequences, ours and PyTorch's."""
