"""Sparse vectors without their zeros, as a training step, an index and an encoder hold them.

N vectors over V terms, P active entries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.boundaries import check_slice, cu_seqlens_of, rows_of, sequence_ids

_ENTRIES_AT_ONCE = 2**27  # of a dense matrix that is searched for active ones


class SparseVectors(NamedTuple):
    """The active entries, those other than zero, of N vectors, one vector after the other.

    Attributes:
        values: fp32 ``[P]``, or float64 of a matrix in it; what gradients follow, unless there is
            ``own``.
        terms: int32 ``[P]``, ascending and unique within a vector.
        cu_seqlens: int64 ``[N + 1]``, vector n owns the entries
            ``cu_seqlens[n] : cu_seqlens[n + 1]``.
        width: V.
        own: the vectors whose values gradients follow, where those of others were gathered too.
    """

    values: Tensor
    terms: Tensor
    cu_seqlens: Tensor
    width: int
    own: "OwnVectors | None" = None

    @property
    def learning(self) -> "OwnVectors":
        """The vectors whose values gradients follow: ``own``, or all."""
        return self.own or OwnVectors(self, 0)

    @property
    def num_vectors(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_entries(self) -> int:
        """P, how many active entries there are."""
        return self.terms.shape[0]

    @classmethod
    def from_dense(cls, matrix: Tensor) -> "SparseVectors":
        """The active entries, NaN among them, of ``matrix [N, V]`` of any dtype, without its graph.
        The host waits for their number."""
        rows = max(_ENTRIES_AT_ONCE // max(matrix.shape[1], 1), 1)
        return cls.concatenate([_active_entries(part) for part in matrix.detach().split(rows)])

    @classmethod
    def concatenate(cls, parts: Sequence["SparseVectors"]) -> "SparseVectors":
        """The vectors of all parts, in order. At least one part; all of the same width."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.values for part in parts]),
            torch.cat([part.terms for part in parts]),
            cu_seqlens_of(torch.cat([part.lengths for part in parts])),
            parts[0].width,
        )

    def split(self, vectors: Sequence[int], entries: Sequence[int]) -> list["SparseVectors"]:
        """The inverse of :meth:`concatenate`, for parts of so many vectors and entries each;
        entries are not copied."""
        pieces = zip(
            self.values.split(list(entries)),
            self.terms.split(list(entries)),
            self.lengths.split(list(vectors)),
            strict=True,
        )
        return [
            SparseVectors(values, terms, cu_seqlens_of(lengths), self.width)
            for values, terms, lengths in pieces
        ]

    def take(self, vectors: Tensor) -> "SparseVectors":
        """The vectors of these numbers, in the given order; -1 gives one without entries."""
        entries, cu_seqlens = rows_of(vectors, self.cu_seqlens)
        return SparseVectors(self.values[entries], self.terms[entries], cu_seqlens, self.width)

    def slice(self, start: int, stop: int) -> "SparseVectors":
        """Vectors ``start : stop``; their entries are not copied."""
        check_slice(start, stop, self.num_vectors)
        if (start, stop) == (0, self.num_vectors):
            return self._replace(own=None)
        first, last = self.cu_seqlens[[start, stop]].tolist()
        cu_seqlens = self.cu_seqlens[start : stop + 1] - first
        return SparseVectors(
            self.values[first:last], self.terms[first:last], cu_seqlens, self.width
        )

    def normalized(self) -> "SparseVectors":
        """The same vectors brought to length 1, so that dot products are cosines; empty ones stay
        empty."""
        owners = sequence_ids(self.cu_seqlens, self.num_entries)
        squares = self.values.new_zeros(self.num_vectors, dtype=torch.float64)
        squares.index_add_(0, owners, self.values.double().square())
        return self._replace(values=(self.values / squares.sqrt()[owners]).float())

    def to(self, device: torch.device | str) -> "SparseVectors":
        """The same on a device, without what gradients follow."""
        values, terms, cu_seqlens = (each.to(device) for each in self[:3])
        return SparseVectors(values, terms, cu_seqlens, self.width)

    @property
    def lengths(self) -> Tensor:
        """Active entries of each vector, int64 ``[N]``."""
        return self.cu_seqlens.diff()

    @property
    def mean_entries(self) -> float:
        """Mean number of active entries of a vector; 0 without vectors."""
        return self.num_entries / max(self.num_vectors, 1)

    @property
    def places(self) -> Tensor:
        """The place of each entry among the ``N * V`` of all vectors; int64 ``[P]``."""
        return sequence_ids(self.cu_seqlens, self.num_entries) * self.width + self.terms

    def dense(self) -> Tensor:
        """All entries, ``[N, V]``; differentiable."""
        shape = self.num_vectors, self.width
        flat = self.values.new_zeros(shape[0] * shape[1])
        return flat.index_copy(0, self.places, self.values).view(shape)


class OwnVectors(NamedTuple):
    """Some neighbours among sparse vectors, which hold them too.

    Attributes:
        vectors: these alone.
        first: number of the first one among all.
    """

    vectors: SparseVectors
    first: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.vectors.num_vectors)


def term_counts(vectors: SparseVectors) -> Tensor:
    """How many vectors have each term, int64 ``[V]``."""
    counts = torch.zeros(vectors.width, dtype=torch.int64, device=vectors.terms.device)
    for part in vectors.terms.split(2**30):  # histograms of a GPU count in 32 bit
        counts += torch.bincount(part, minlength=vectors.width)
    return counts


def mean_flops(queries: SparseVectors, documents: SparseVectors) -> float:
    """Expected number of multiplications to score one query against one document.

    The sum over the terms of p_q(v) p_d(v), p the share of the queries (documents) in which term
    v is active: the FLOPS measure of Formal et al., SPLADE, 2021.
    """
    shares = (
        term_counts(side).double() / max(side.num_vectors, 1) for side in (queries, documents)
    )
    return float(torch.dot(*shares))


def used_terms(rows: Tensor | SparseVectors) -> Tensor:
    """Which terms are active, other than zero, in some vector of ``rows [N, V]``; bool ``[V]``."""
    return (rows != 0).any(0) if isinstance(rows, Tensor) else term_counts(rows) > 0


def _active_entries(matrix: Tensor) -> SparseVectors:
    width, flat = matrix.shape[1], matrix.flatten()
    active = flat != 0
    cu_seqlens = cu_seqlens_of(active.view(matrix.shape).sum(1))
    places = active.nonzero().squeeze(1)
    values = flat[places].to(torch.promote_types(flat.dtype, torch.float32))
    return SparseVectors(values, (places % max(width, 1)).int(), cu_seqlens, width)
