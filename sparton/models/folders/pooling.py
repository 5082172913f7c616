"""Token pooling in folders of late-interaction models: in those of sentence-transformers a module
behind all others; PyLate has it as an argument of ``encode`` alone.
"""

from typing import Any

from sparton.models.folders.files import read_module
from sparton.models.repository import Source, join
from sparton.types import TokenPooling

KIND = "HierarchicalTokenPooling"
PATH = f"sentence_transformers.multi_vector_encoder.modules.token_pooling.{KIND}"


def describe_pooling(pooling: TokenPooling) -> dict[str, Any]:
    """The content of the module's ``config.json``."""
    return {
        "pool_factor": pooling.factor,
        "num_protected_tokens": pooling.protected,
        "normalize_embeddings": pooling.normalize,
        "tasks": ["document"],
    }


def read_pooling(source: Source, folder: str | None, normalize: bool) -> TokenPooling:
    """How the module in a folder pools; where there is none, not at all.

    Args:
        normalize: whether the model gives vectors the length 1.

    Raises:
        ValueError: it pools queries, or leaves lengths that this project does not.
    """
    if folder is None:
        return TokenPooling(normalize=normalize)
    module = read_module(source, join(folder, "config.json"))
    factor = module.get("pool_factor", float, 1.0)
    protected = module.get("num_protected_tokens", int, 1)
    if factor < 1:
        module.refuse("pool_factor", "a number from 1 on")
    if protected < 0:
        module.refuse("num_protected_tokens", "a whole number from 0 on")
    sides = module.strings("tasks") or ["document"]
    if sides != ["document"]:
        raise ValueError(
            f"{module.place} pools tokens of {' and '.join(sides)}; only those of documents are "
            "pooled here"
        )
    # What sentence-transformers takes where nothing is said.
    if module.get("normalize_embeddings", bool, False) != normalize:
        raise ValueError(
            f"{module.place} says normalize_embeddings={not normalize}, but the model has "
            f"normalize={normalize}: only means of the same length as tokens are supported"
        )
    return TokenPooling(factor, protected, normalize)
