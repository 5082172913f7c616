"""Vectors as text of JSON, whose numbers have the fewest digits that give the same fp32 again.

A document with token vectors has tens of thousands of numbers: they are written without becoming
objects first.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray


def weights_text(
    keys: Sequence[str], terms: NDArray[np.int32] | None, weights: NDArray[np.float32] | None
) -> str:
    """An object that maps terms to weights.

    Args:
        keys: of the V terms, with quotation marks.
        terms, weights: of a text; None where it has none.
    """
    if terms is None or weights is None:
        return "{}"
    pairs = zip(terms.tolist(), _digits(weights), strict=True)
    return f"{{{', '.join([f'{keys[term]}: {digits}' for term, digits in pairs])}}}"


def numbers_text(values: NDArray[np.floating]) -> str:
    """A list of numbers."""
    return f"[{', '.join(_digits(values))}]"


def vectors_text(vectors: NDArray[np.floating]) -> str:
    """A list of lists, one for each row of ``vectors [n, E]``."""
    flat, width = _digits(vectors.ravel()), vectors.shape[1]
    rows = [", ".join(flat[at : at + width]) for at in range(0, len(flat), width)]
    return f"[[{'], ['.join(rows)}]]"


def _digits(values: NDArray[np.floating]) -> list[str]:
    if values.dtype == np.float16:
        return _halves()[np.ascontiguousarray(values).view(np.uint16)].tolist()
    return values.astype(np.float32).astype(str).tolist()


@cache
def _halves() -> NDArray[np.object_]:
    """The digits of all numbers of 16 bits, by their bits."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return every.astype(np.float32).astype(str).astype(object)
