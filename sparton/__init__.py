"""Train and evaluate learned sparse (SPLADE) and late-interaction (ColBERT) retrievers."""

__version__ = "0.1.0"
