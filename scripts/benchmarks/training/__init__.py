"""Whole trainings, ours and those of sentence-transformers' trainers."""
