"""How often words occur in texts that are generated."""

import numpy as np

AROUND = 2  # special tokens of a text
_ZIPF_SHIFT = 2.7  # Mandelbrot's, of English


class Frequencies:
    """Of some words, the most frequent first; those of a natural language."""

    def __init__(self, number: int) -> None:
        self._cumulative = np.cumsum(1.0 / (np.arange(number) + _ZIPF_SHIFT))

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """int64 ``[count]``, numbers of words."""
        found = np.searchsorted(self._cumulative, random.random(count) * self._cumulative[-1])
        return found.clip(max=len(self._cumulative) - 1)
