"""How many positions of a block of a mixture's stream each source has."""

import math
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from sparton.arguments import ArgumentError

WEIGHTED_BLOCK = 1 << 16
# Short, so that shares hold soon: a position is a whole batch.
HOMOGENEOUS_BLOCK = 1 << 10


def counts_in_block(
    sizes: Mapping[str, int],
    weights: Mapping[str, float] | None,
    alpha: float | None,
    block: int = WEIGHTED_BLOCK,
) -> NDArray[np.int64]:
    """Positions of each source in a block, int64, in the order of ``sizes``.

    Args:
        sizes: examples by source.
        weights: relative weights by source; or None.
        alpha: a source's weight is its size to this power. None, without weights, makes a block of
            all examples.
        block: positions of another block.

    Raises:
        ValueError: from :func:`check_proportions`, or a weight gives no position of a block.
    """
    check_proportions(sizes, weights, alpha)
    if weights is not None:
        return _by_weight(sizes, weights, block)
    if alpha is None:
        return np.array(list(sizes.values()), np.int64)
    return _by_weight(sizes, {name: float(size) ** alpha for name, size in sizes.items()}, block)


def check_proportions(
    sources: Collection[str], weights: Mapping[str, float] | None, alpha: float | None
) -> None:
    """Refuse what no sizes of the sources would make right.

    Raises:
        ValueError: weights and ``alpha`` are both given, ``alpha`` is not between 0 and 1, names do
            not match, or a weight is not positive.
    """
    if alpha is not None and not 0 <= alpha <= 1:
        raise ArgumentError("{alpha} must be from 0, equal shares, to 1, sizes", alpha=alpha)
    if weights is None:
        return
    if alpha is not None:
        raise ArgumentError(
            "{weights:name} are given, and sizes to a power make others: set {alpha}, or leave "
            "{weights:name} out",
            weights=weights,
            alpha=None,
        )
    if set(weights) != set(sources):
        raise ArgumentError(
            "{weights:name} are given for {} but the sources are {}",
            *(sorted(weights), sorted(sources)),
            weights=weights,
        )
    for name, value in weights.items():
        if not (math.isfinite(value) and value > 0):
            raise ArgumentError(
                "{weights:name}: the weight of source {!r} is {}, it must be positive and finite",
                *(name, float(value)),
                weights=weights,
            )


def _by_weight(
    sources: Mapping[str, int], weights: Mapping[str, float], block: int
) -> NDArray[np.int64]:
    values = np.array([float(weights[name]) for name in sources])
    exact = values / values.sum() * block
    counts = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(counts - exact, kind="stable")
    counts[largest_remainders[: block - counts.sum()]] += 1
    for name, count in zip(sources, counts):
        if count == 0:
            raise ValueError(
                f"the weight of source {name!r} is below 1 in {block}: "
                "raise it or leave the source out"
            )
    return counts
