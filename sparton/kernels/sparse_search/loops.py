"""Loops over postings on a CPU, compiled by numba at the first call; they hold no lock of Python.

N documents in blocks, Q queries, V terms, P postings.

Machine code is kept beside this file or, where that cannot be written, in the user's cache.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from sparton.kernels.sort_keys import LOW
from sparton.kernels.sparse_search.postings import GROUP


def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return numba.njit(nogil=True, cache=True)(loop)
    except RuntimeError:  # no folder to keep machine code in
        return numba.njit(nogil=True)(loop)


@_compiled
def count_postings(
    terms: NDArray[np.int32],
    bounds: NDArray[np.int64],
    first_document: int,
    documents: tuple[int, int],
    width: int,
    block: int,
    counts: NDArray[np.int64],
) -> None:
    """Add up how many postings each term has in each block, for some documents of a part.

    Args:
        terms, bounds: the part's vectors.
        first_document: number of the part's first document.
        documents: the first of these documents and the one after the last, counted in the part.
        counts: int64 ``[blocks * V]``.
    """
    for n in range(documents[0], documents[1]):
        row = (first_document + n) // block * width
        for p in range(bounds[n], bounds[n + 1]):
            counts[row + terms[p]] += 1


@_compiled
def place_postings(
    terms: NDArray[np.int32],
    values: NDArray[np.float32],
    bounds: NDArray[np.int64],
    first_document: int,
    documents: tuple[int, int],
    width: int,
    block: int,
    ends: NDArray[np.int64],
    places: NDArray[np.uint16],
    weights: NDArray[np.float32],
) -> None:
    """Write the postings of some documents of a part behind those of documents before.

    Args:
        ends: int64 ``[blocks * V]``, where the next posting of each block and term belongs; moves.
        places, weights: ``[P]``, of all postings.
    """
    for n in range(documents[0], documents[1]):
        number = first_document + n
        row, place = number // block * width, number % block
        for p in range(bounds[n], bounds[n + 1]):
            slot = ends[row + terms[p]]
            ends[row + terms[p]] = slot + 1
            places[slot] = place
            weights[slot] = values[p]


@_compiled
def _add_term(
    scores: NDArray[np.float32],
    places: NDArray[np.uint16],
    weights: NDArray[np.float32],
    weight: np.float32,
) -> None:
    for p in range(len(places)):
        scores[places[p]] += weight * weights[p]


@_compiled
def _best_first(keys: NDArray[np.int64], kept: int, k: int) -> int:
    """Bring the k largest of the first ``kept`` keys, which differ, to the front, and return the
    smallest of these. Lomuto's partition moves keys without a branch that depends on them;
    ``np.partition`` takes 6 s to compile."""
    first, last = 0, kept - 1
    while True:
        middle = (first + last) // 2
        pivot = keys[middle]
        keys[middle] = keys[last]
        place = first
        for i in range(first, last):
            key = keys[i]
            keys[i] = keys[place]
            keys[place] = key
            place += key > pivot
        keys[last] = keys[place]
        keys[place] = pivot
        if place == k - 1:
            return pivot
        if place < k - 1:
            first = place + 1
        else:
            last = place - 1


@_compiled
def search_blocks(
    places: NDArray[np.uint16],
    weights: NDArray[np.float32],
    starts: NDArray[np.int64],
    num_documents: int,
    width: int,
    block: int,
    blocks: tuple[int, int],
    terms: NDArray[np.int32],
    values: NDArray[np.float32],
    bounds: NDArray[np.int64],
    excluded: NDArray[np.int64],
    k: int,
    keys: NDArray[np.int64],
) -> None:
    """The best documents of some blocks for Q queries.

    Args:
        places, weights, starts, num_documents, width, block: see :class:`.Postings`.
        blocks: the first block and the one after the last.
        terms, values, bounds: the queries.
        excluded: int64 ``[Q, M]``, documents that are no result; -1 for none.
        k: how many documents.
        keys: int64 ``[Q, C]``, C more than k or no fewer than the documents of these blocks; gets
            keys of documents with a score above zero, the k best ones among them, and 0.
    """
    scores = np.zeros(block, np.float32)
    bits = scores.view(np.int32)  # of scores above zero, these order them
    floors = np.zeros(len(excluded), np.int32)
    kept = np.zeros(len(excluded), np.int64)
    slots = keys.shape[1]
    longest = 0
    for q in range(len(excluded)):
        longest = max(longest, bounds[q + 1] - bounds[q])
    begins, ends = np.empty(longest, np.int64), np.empty(longest, np.int64)
    for b in range(blocks[0], blocks[1]):
        first = b * block
        size = min(block, num_documents - first)
        for q in range(len(excluded)):
            # All that lies far apart in memory first, so that one wait overlaps the others.
            length = bounds[q + 1] - bounds[q]
            total = 0
            for i in range(length):
                row = b * width + terms[bounds[q] + i]
                begins[i], ends[i] = starts[row], starts[row + 1]
                total += ends[i] - begins[i]
            if total == 0:
                continue
            for i in range(length):
                own = slice(begins[i], ends[i])
                _add_term(scores, places[own], weights[own], values[bounds[q] + i])
            for document in excluded[q]:
                if first <= document < first + size:
                    scores[document - first] = 0
            floor, found = floors[q], kept[q]
            for start in range(0, size, GROUP):
                top = np.int32(0)
                for bit in bits[start : start + GROUP]:
                    top = max(top, bit)
                if top <= floor:
                    continue
                for n in range(start, start + GROUP):
                    if bits[n] > floor:
                        if found == slots:
                            floor = np.int32(_best_first(keys[q], found, k) >> 32)
                            found = k
                            if bits[n] <= floor:
                                continue
                        keys[q, found] = (np.int64(bits[n]) << 32) | (LOW - first - n)
                        found += 1
            floors[q], kept[q] = floor, found
            scores[:size] = 0
    for q in range(len(excluded)):
        keys[q, kept[q] :] = 0
