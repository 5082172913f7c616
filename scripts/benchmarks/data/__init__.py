"""Preparing files of training data, and loading batches from them."""
