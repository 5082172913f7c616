"""Boundaries of sequences where the host reads them; a GPU does not wait for that."""

from itertools import pairwise

from torch import Tensor


def read_boundaries(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """The values of ``cu_seqlens`` ``[N + 1]``.

    Raises:
        ValueError: they do not ascend from 0 to ``total``, the number of tokens.
    """
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(
            f"{name} must go from 0 to the number of tokens, {total}; it goes from {bounds[0]} to "
            f"{bounds[-1]}"
        )
    for n, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise ValueError(f"{name} must ascend; entry {n} is {start} and the next one {stop}")
    return bounds
