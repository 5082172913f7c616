"""How a forward is cut into programs: groups of sequences, and bands of blocks of rows.

N sequences, T packed tokens.

The programs that run at the same time are a rectangle: a band of blocks of rows by some groups of
sequences. Tile after tile, each reads its rows again, from the L2 cache as long as a band's fit
there; and hidden states are read by all blocks of a band while they are there. So a band is as wide
as its share of the cache, however wide the rows are, and there are groups enough for the
multiprocessors that it leaves idle.
"""

from typing import NamedTuple

import torch

from sparton.kernels.launch import cdiv, l2_cache, multiprocessors

# Of the L2 cache, which an H100 has in halves of its own each: a band's rows take a sixth.
SHARES = 6
# Waves of programs from which on an incomplete last one does not matter, and what a program costs
# beyond its tokens, in bytes of hidden states.
MANY_WAVES, START_BYTES = 8, 200 * 1024


class Grouping(NamedTuple):
    """Programs of a forward.

    Attributes:
        tokens: of a group, which holds the sequences that start within so many.
        groups: how many there are.
        band: blocks of rows that go through one group after the other side by side.
    """

    tokens: int
    groups: int
    band: int


def band_of(block_bytes: int, device: torch.device) -> int:
    """Blocks of a band, given what a block of rows takes."""
    return max(l2_cache(device) // SHARES // block_bytes, 1)


def group_evenly(
    N: int, T: int, blocks: int, band: int, *, tile: int, most: int, start: int, processors: int
) -> Grouping:
    """Groups that fill whole waves of the multiprocessors, each of which runs one program at a
    time, without more than ``band`` blocks of rows in use.

    Args:
        N, T: sequences and their tokens, at least 1 of each.
        blocks: blocks of rows; each has a program for every group.
        band: as in :class:`Grouping`.
        tile: tokens of a tile.
        most: about how many tokens a group has at most; it holds whole sequences.
        start: what a program costs beyond its tokens, in tokens.
        processors: multiprocessors.
    """

    def tokens_of(groups: int) -> int:
        """Whole sequences, where all are as long as the mean."""
        return cdiv(cdiv(N, groups) * T, N)

    def cost(groups: int) -> int:
        tokens = tokens_of(groups)
        waves = cdiv(cdiv(T, tokens) * blocks, processors)
        return waves * (cdiv(tokens, tile) * tile + start)

    # Less than a band leaves the rest of the cache unused.
    fewest = min(max(cdiv(T, most), cdiv(processors, band) if band < blocks else 1), N)
    groups = fewest
    if fewest * blocks < MANY_WAVES * processors:
        first = fewest * blocks // processors
        waves = range(first, first + MANY_WAVES + 1)
        candidates = {min(max(wave * processors // blocks, fewest), N) for wave in waves}
        groups = min(sorted(candidates), key=cost)
    tokens = tokens_of(groups)
    return Grouping(tokens, cdiv(T, tokens), band)


def group_rows(
    N: int, T: int, V: int, row_bytes: int, device: torch.device, *,
    rows: int, tile: int, most: int, band: int | None,
) -> Grouping:  # fmt: skip
    """The programs of a forward of N sequences, T tokens and V rows of so many bytes.

    Args:
        rows, tile: rows of a block and tokens of a tile.
        most: about how many tokens a group has at most; it holds whole sequences.
        band: blocks of a band; None: by the L2 cache.
    """
    band = band or band_of(rows * row_bytes, device)
    blocks, processors = cdiv(V, rows), multiprocessors(device)
    return group_evenly(
        N, T, blocks, band,
        tile=tile, most=most, start=START_BYTES // row_bytes, processors=processors,
    )  # fmt: skip
