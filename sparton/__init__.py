"""Train and evaluate learned sparse (SPLADE) and late-interaction (ColBERT) retrievers.

What is named here is imported when it is first asked for: ``import sparton`` alone is quick.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Where a name of the package comes from: a module, and what it is called there.
_HOMES = {
    "TrainedRun": ("sparton.cli.api", "TrainedRun"),
    "train": ("sparton.cli.api", "train"),
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
