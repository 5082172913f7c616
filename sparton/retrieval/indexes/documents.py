"""What indexes are made of: encoded texts in memory, or in the files of a folder.

N texts, T tokens.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from sparton.kernels.sparse_vectors import SparseVectors
from sparton.packing import ranges_of
from sparton.representations import Representations, TokenVectors
from sparton.types import Kind


class Empty(Protocol):
    """Room for an array, in memory or in a file that stands for memory; as ``torch.empty``."""

    def __call__(self, *size: int, dtype: torch.dtype) -> Tensor: ...


class Keep(Protocol):
    """Gives what an index has made of documents, by a name that says how."""

    def __call__(
        self, name: str, make: Callable[[Empty], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """
        Args:
            name: of the arrays: the same documents and name mean the same arrays.
            make: makes them on the host, with room for large ones where it is told.
        """
        ...


def made_anew(name: str, make: Callable[[Empty], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Keeps nothing; a :class:`Keep`."""
    return make(torch.empty)


class Documents:
    """N encoded texts to be indexed, in parts that are read when they are needed.

    Args:
        kinds: the halves of their representations that there are.
        read: gives the parts, at least one, which may lie in files. Sparse halves hold active
            entries alone, token vectors have no mask.
        keep: gives what is made of them.
    """

    def __init__(
        self,
        kinds: frozenset[Kind],
        read: Callable[[], Sequence[Representations]],
        keep: Keep = made_anew,
    ) -> None:
        self.kinds, self.keep, self._read = kinds, keep, read

    @classmethod
    def of(cls, documents: "Representations | Documents") -> "Documents":
        """Texts in memory, of which nothing is kept; others as they are."""
        if isinstance(documents, Documents):
            return documents
        return cls(documents.kinds, lambda: [documents])

    def only(self, kinds: frozenset[Kind]) -> "Documents":
        """The same texts with these halves alone."""
        return Documents(self.kinds & kinds, partial(_only, self, kinds), self.keep)

    def with_sparse(self, vectors: SparseVectors) -> "Documents":
        """The same texts with other sparse vectors, in memory; nothing is kept of these."""

        def read() -> list[Representations]:
            ends = [0, *accumulate(part.num_texts for part in self.parts)]
            return [
                part._replace(sparse=vectors.slice(first, last))
                for part, (first, last) in zip(self.parts, pairwise(ends))
            ]

        return Documents(self.kinds | {"sparse"}, read)

    @cached_property
    def parts(self) -> Sequence[Representations]:
        """All texts in their order."""
        return self._read()

    @property
    def num_texts(self) -> int:
        return sum(part.num_texts for part in self.parts)

    @property
    def sparse(self) -> list[SparseVectors]:
        """The sparse vectors of each part that has them."""
        return [part.sparse for part in self.parts if isinstance(part.sparse, SparseVectors)]

    @cached_property
    def tokens(self) -> "TokenParts":
        """The token vectors of all texts, which have them."""
        return TokenParts([part.tokens for part in self.parts if part.tokens is not None])

    @cached_property
    def dense(self) -> "TokenParts":
        """The dense vectors of all texts, which have them."""
        return TokenParts([part.dense for part in self.parts if part.dense is not None])

    @property
    def vectors(self) -> dict[Kind, "TokenParts"]:
        """The halves that there are, but for sparse vectors."""
        halves: tuple[Kind, ...] = ("dense", "tokens")
        return {kind: getattr(self, kind) for kind in halves if kind in self.kinds}


def _only(documents: Documents, kinds: frozenset[Kind]) -> list[Representations]:
    return [
        Representations(**{kind: getattr(part, kind) for kind in kinds}) for part in documents.parts
    ]


def has_room(nbytes: int, device: torch.device, share: float) -> bool:
    """Whether a device is a GPU of whose free memory so many bytes take no more than a share."""
    return device.type == "cuda" and nbytes <= share * torch.cuda.mem_get_info(device)[0]


class TokenParts:
    """Token vectors of N texts in several parts, which are numbered through and not copied.

    Args:
        parts: at least one, stored alike, without masks.

    Attributes:
        cu_seqlens: int64 ``[N + 1]``, boundaries of the texts.
        width: of a vector.
        dtype: in which they are stored.
        nbytes: of all vectors, their scales and the boundaries.
    """

    def __init__(self, parts: Sequence[TokenVectors]) -> None:
        self._parts = parts
        self._texts = [0, *accumulate(part.num_texts for part in parts)]
        self._tokens = [0, *accumulate(len(part.values) for part in parts)]
        bounds = [part.cu_seqlens[:-1].long() + first for part, first in zip(parts, self._tokens)]
        self.cu_seqlens = torch.cat([*bounds, torch.tensor(self._tokens[-1:])])
        self.width, self.dtype = parts[0].width, parts[0].values.dtype
        self.nbytes = self.cu_seqlens.nbytes
        for part in parts:
            self.nbytes += part.values.nbytes
            self.nbytes += 0 if part.scales is None else part.scales.nbytes

    @classmethod
    def of(cls, documents: "TokenVectors | TokenParts") -> "TokenParts":
        """Texts in one part; others as they are."""
        return documents if isinstance(documents, TokenParts) else cls([documents])

    def held_on(self, device: torch.device) -> "TokenParts":
        """The same texts in one part, whose vectors are on a device and boundaries on the host."""
        first = self._parts[0]
        values = first.values.new_empty((self.num_tokens, self.width), device=device)
        scales = first.scales
        if scales is not None:
            scales = scales.new_empty(self.num_tokens, device=device)
        for part, (start, stop) in zip(self._parts, pairwise(self._tokens)):
            values[start:stop].copy_(part.values)
            if scales is not None and part.scales is not None:
                scales[start:stop].copy_(part.scales)
        return TokenParts([TokenVectors(values, self.cu_seqlens, scales=scales)])

    @property
    def device(self) -> torch.device:
        """Where the vectors are."""
        return self._parts[0].values.device

    @property
    def num_texts(self) -> int:
        return self._texts[-1]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._tokens[-1]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each text, int64 ``[N]``."""
        return self.cu_seqlens.diff()

    def slice(self, start: int, stop: int) -> TokenVectors:
        """Texts ``start : stop``, at least one; a copy only where they are of several parts."""
        found = self._pieces(start, stop)
        return found[0] if len(found) == 1 else TokenVectors.concatenate(found)

    def between(self, start: int, stop: int) -> "TokenParts":
        """Texts ``start : stop``, at least one, numbered from 0 on; no vectors are copied."""
        return TokenParts(self._pieces(start, stop))

    def _pieces(self, start: int, stop: int) -> list[TokenVectors]:
        found = []
        for number in range(bisect_right(self._texts, start) - 1, len(self._parts)):
            first, last = self._texts[number : number + 2]
            if first >= stop:
                break
            found.append(
                self._parts[number].slice(max(start, first) - first, min(stop, last) - first)
            )
        return found

    def take(self, texts: Tensor) -> TokenVectors:
        """The texts of these numbers, ascending."""
        bounds = torch.searchsorted(texts, torch.tensor(self._texts)).tolist()
        return TokenVectors.concatenate(
            [
                part.take(texts[first:last] - before)
                for part, before, (first, last) in zip(self._parts, self._texts, pairwise(bounds))
            ]
        )

    def chunks(self, most: int) -> Iterator[tuple[int, Tensor]]:
        """All vectors, at most so many at a time, of 16 or 32 bits; each time with the number of
        tokens before them."""
        for part, before in zip(self._parts, self._tokens):
            for rows in ranges_of(len(part.values), most):
                few = slice(rows.start, rows.stop)
                scales = None if part.scales is None else part.scales[few]
                vectors = TokenVectors(part.values[few], part.cu_seqlens[:1], scales=scales)
                yield before + rows.start, vectors.restored().values
