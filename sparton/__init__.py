"""Train SPLADE and late-interaction retrievers, evaluate them, and search with them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparton.retriever import Retriever, load

__all__ = ["Retriever", "load"]
__version__ = "0.1.0"

# Looked up at the first use, so that to import the package costs nothing.
_HOME = {"Retriever": "sparton.retriever", "load": "sparton.retriever"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sparton' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
