"""Keyed pseudo-random numbers and permutations that cost no memory.

Everything is a pure function of integers, vectorised over uint64 arrays whose arithmetic wraps
modulo 2^64. The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood, 2014); the
permutation is a Feistel network over the next power of four with cycle walking (Black, Rogaway,
2002): an index that leaves the range is encrypted again until it returns.
"""

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

# What a key is derived for; different purposes must never share one.
ORDER, SHUFFLE, DRAW, SUBSTITUTE, PART = range(5)

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ROUNDS = 6


def mix(values: UInt64Array) -> UInt64Array:
    """A bijection of the 64-bit integers whose output looks random; any shape."""
    values = values + GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derive_key(*parts: int | NDArray[np.int64]) -> UInt64Array:
    """One key per element out of several integers (seed, purpose, epoch ...); at least 1-d.

    The order of the parts matters, and arrays broadcast against numbers.
    """
    key = np.zeros(1, np.uint64)
    for part in parts:
        if isinstance(part, int):
            key = mix(key ^ np.array([part & 0xFFFFFFFFFFFFFFFF], np.uint64))
        else:
            key = mix(key ^ np.atleast_1d(part).astype(np.uint64))
    return key


def permute(indices: NDArray[np.int64], size: int, key: UInt64Array) -> NDArray[np.int64]:
    """Images of ``indices`` under the permutation of ``0 .. size - 1`` that ``key`` selects.

    Args:
        indices: int64 ``[P]``, each at least 0 and below ``size``.
        size: number of elements permuted.
        key: uint64 ``[P]`` or ``[1]``; elements with different keys belong to different
            permutations.

    Returns:
        int64 ``[P]``.
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    images = indices.astype(np.uint64)
    keys = np.broadcast_to(key, images.shape)
    walking = np.arange(images.size)
    while walking.size:
        images[walking] = _encrypt(images[walking], keys[walking], half_bits)
        walking = walking[images[walking] >= size]
    return images.astype(np.int64)


def _encrypt(values: UInt64Array, key: UInt64Array, half_bits: np.uint64) -> UInt64Array:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for round_number in range(1, ROUNDS + 1):
        round_key = key + GOLDEN * np.array(round_number, np.uint64)
        left, right = right, left ^ (mix(right ^ mix(round_key)) & mask)
    return (left << half_bits) | right
