"""Train SPLADE and late-interaction (ColBERT) retrievers, evaluate them, and search with them.

What is named here is imported when it is first asked for: ``import sparton`` alone is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparton import ops
    from sparton.cli.api import TrainedRun, train
    from sparton.retriever import Retriever, load

__all__ = ["Retriever", "TrainedRun", "load", "ops", "train"]
__version__ = "0.1.0"

# The modules that the names of the package come from.
_HOMES = {
    "Retriever": "sparton.retriever",
    "TrainedRun": "sparton.cli.api",
    "load": "sparton.retriever",
    "train": "sparton.cli.api",
}


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("sparton.ops")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
