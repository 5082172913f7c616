"""Texts that were encoded in one order and are wanted in another. N texts."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations, TokenVectors

_THREADS = 8  # more find no memory that is idle


def in_order(parts: list[Representations], order: NDArray[np.int64]) -> Representations:
    """The texts of all parts in another order. Parts are given up one by one: hardly more memory is
    taken than they have.

    Args:
        parts: on the host, held alike; the list is empty afterwards.
        order: ``[N]``, the place that each text has in the end.
    """
    if len(order) == 1:
        return parts.pop()
    places, width, kinds = torch.from_numpy(order), parts[0].width, parts[0].kinds
    wholes = {kind: _Whole([getattr(part, kind) for part in parts], places) for kind in kinds}
    left = list(zip(parts, places.split([part.num_texts for part in parts]), strict=True))
    parts.clear()

    def place_last(_: object) -> None:
        part, own = left.pop()
        for kind, whole in wholes.items():
            whole.place(getattr(part, kind), own)

    # Copies to places all over new memory: each waits, and several wait together.
    with ThreadPoolExecutor(min(torch.get_num_threads(), _THREADS)) as threads:
        list(threads.map(place_last, range(len(left))))
    halves: dict[str, Any] = {
        kind: _sparse(whole, width) if kind == "sparse" else _token_vectors(whole)
        for kind, whole in wholes.items()
    }
    return Representations(**halves)


class _Whole:
    """What the rows of all texts become, which come part by part.

    Attributes:
        arrays: of the rows.
        cu_seqlens: int64 ``[N + 1]``, the boundaries of the texts in them.
    """

    def __init__(self, halves: Sequence[Any], places: Tensor) -> None:
        lengths = torch.cat([half.lengths for half in halves])
        ordered = torch.empty_like(lengths)
        ordered[places] = lengths
        self.cu_seqlens = cu_seqlens_of(ordered)
        total = int(self.cu_seqlens[-1])
        self.arrays = [empty_on_host((total, *x.shape[1:]), x.dtype) for x in _arrays(halves[0])]

    def place(self, half: Any, places: Tensor) -> None:
        """Copy the rows of a part, whose texts have these places."""
        moves, lengths = self.cu_seqlens[places] - half.cu_seqlens[:-1], half.lengths
        rows = np.repeat(moves.numpy(), lengths.numpy())  # torch would ask for threads of its own
        rows += np.arange(len(rows))
        for whole, part in zip(self.arrays, _arrays(half), strict=True):
            _copied(whole).index_copy_(0, torch.from_numpy(rows), _copied(part))


def _sparse(whole: _Whole, width: int) -> SparseVectors:
    values, terms = whole.arrays
    return SparseVectors(values, terms, whole.cu_seqlens, width)


def _token_vectors(whole: _Whole) -> TokenVectors:
    values, *scales = whole.arrays
    return TokenVectors(values, whole.cu_seqlens, scales=scales[0] if scales else None)


def _arrays(half: Any) -> list[Tensor]:
    """Those with a row for each active entry, or for each token."""
    beside = half.terms if isinstance(half, SparseVectors) else half.scales
    return [half.values] if beside is None else [half.values, beside]


def _copied(rows: Tensor) -> Tensor:
    """Rows as ``index_copy_`` takes them: it knows no FP8."""
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows


def empty_on_host(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the host, of any content. NumPy asks for large pages: to find small ones, when
    they are first written, takes longer than the writing."""
    if 0 in shape:  # of which torch makes no view
        return torch.empty(shape, dtype=dtype)
    room = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(room).view(dtype).view(*shape)
