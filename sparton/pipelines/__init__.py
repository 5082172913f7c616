"""What is made of collections and models beside a training; each function's module is imported when
the function is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparton.pipelines.adaptation import adapt_lm
    from sparton.pipelines.averaging import average_models
    from sparton.pipelines.embeddings import cache_embeddings
    from sparton.pipelines.export import export_vectors
    from sparton.pipelines.idf import compute_idf
    from sparton.pipelines.mining import mine_hard_negatives
    from sparton.pipelines.unlabelled import pair_texts

__all__ = [
    "adapt_lm",
    "average_models",
    "cache_embeddings",
    "compute_idf",
    "export_vectors",
    "mine_hard_negatives",
    "pair_texts",
]

_MODULES = {
    "adapt_lm": "adaptation",
    "average_models": "averaging",
    "cache_embeddings": "embeddings",
    "compute_idf": "idf",
    "export_vectors": "export",
    "mine_hard_negatives": "mining",
    "pair_texts": "unlabelled",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
