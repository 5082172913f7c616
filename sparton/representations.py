"""What encoders make of texts.

N texts, V terms, T packed tokens, E width of a token's vector, D of a text's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.boundaries import check_slice, cu_seqlens_of, rows_of
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.types import Kind

KINDS: dict[Kind, str] = {
    "sparse": "sparse vectors", "tokens": "token vectors", "dense": "dense vectors"
}  # fmt: skip


class TokenVectors(NamedTuple):
    """One vector per token of N texts, packed end to end: what MaxSim compares.

    Attributes:
        values: ``[T, E]``, L2-normalised where the encoder does so.
        cu_seqlens: int32 ``[N + 1]``, the boundaries of the texts; int64 for a whole collection on
            the host.
        mask: bool ``[T]``, False where a token takes no part in MaxSim; None if all do.
        max_seqlen: upper bound of the texts' lengths, where the host knows it, or None.
        scales: fp32 ``[T]``, what each vector of a collection in FP8 is to be multiplied with; None
            of all others.
    """

    values: Tensor
    cu_seqlens: Tensor
    mask: Tensor | None = None
    max_seqlen: int | None = None
    scales: Tensor | None = None

    @property
    def num_texts(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @classmethod
    def of_texts(cls, vectors: Tensor) -> "TokenVectors":
        """One vector for each text, of which MaxSim is the dot product: ``[N, D]``."""
        bounds = torch.arange(len(vectors) + 1, dtype=torch.int32, device=vectors.device)
        return cls(vectors, bounds, max_seqlen=1)

    @classmethod
    def concatenate(cls, parts: Sequence["TokenVectors"]) -> "TokenVectors":
        """The texts of all parts, in order; all have a mask or none has."""
        bounds, total = [parts[0].cu_seqlens[:1]], 0
        for part in parts:
            bounds.append(part.cu_seqlens[1:] + total)
            total += part.values.shape[0]
        masks = [part.mask for part in parts if part.mask is not None]
        longest = [part.max_seqlen for part in parts if part.max_seqlen is not None]
        scales = [part.scales for part in parts if part.scales is not None]
        return cls(
            torch.cat([part.values for part in parts]),
            torch.cat(bounds),
            torch.cat(masks) if masks else None,
            max(longest) if len(longest) == len(parts) else None,
            torch.cat(scales) if scales else None,
        )

    def split(self, texts: Sequence[int], tokens: Sequence[int]) -> list["TokenVectors"]:
        """The inverse of :meth:`concatenate`, for parts of so many texts and tokens each; vectors
        are not copied."""
        sizes = list(tokens)
        masks, scales = (
            [None] * len(sizes) if x is None else x.split(sizes) for x in (self.mask, self.scales)
        )
        lengths = self.lengths.split(list(texts))
        return [
            TokenVectors(values, cu_seqlens_of(own, torch.int32), mask, self.max_seqlen, own_scales)
            for values, own, mask, own_scales in zip(
                self.values.split(sizes), lengths, masks, scales, strict=True
            )
        ]

    def take(self, texts: Tensor) -> "TokenVectors":
        """The texts of these numbers, in the given order; -1 gives one without tokens."""
        rows, cu_seqlens = rows_of(texts, self.cu_seqlens)
        mask, scales = (None if x is None else x[rows] for x in (self.mask, self.scales))
        return TokenVectors(self.values[rows], cu_seqlens, mask, self.max_seqlen, scales)

    def slice(self, start: int, stop: int) -> "TokenVectors":
        """Texts ``start : stop``; their vectors are not copied."""
        check_slice(start, stop, self.num_texts)
        if (start, stop) == (0, self.num_texts):
            return self
        first, last = self.cu_seqlens[[start, stop]].tolist()
        mask, scales = (None if x is None else x[first:last] for x in (self.mask, self.scales))
        cu_seqlens = self.cu_seqlens[start : stop + 1] - first
        return TokenVectors(self.values[first:last], cu_seqlens, mask, self.max_seqlen, scales)

    def first(self, width: int) -> "TokenVectors":
        """The first components of every vector, of length 1 again; those of vectors in FP8 in
        fp32."""
        whole = self.restored()
        values = F.normalize(whole.values[:, :width].float(), dim=1)
        return whole._replace(values=values.to(whole.values.dtype))

    def to(self, device: torch.device | str) -> "TokenVectors":
        """The same on a device."""
        values, cu_seqlens = self.values.to(device), self.cu_seqlens.to(device)
        mask, scales = (None if x is None else x.to(device) for x in (self.mask, self.scales))
        return TokenVectors(values, cu_seqlens, mask, self.max_seqlen, scales)

    def restored(self, dtype: torch.dtype = torch.float32) -> "TokenVectors":
        """The same with vectors in FP8 in another dtype; all others stay as they are."""
        if self.scales is None:
            return self
        values = self.values.to(dtype).mul_(self.scales[:, None])
        return self._replace(values=values, scales=None)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each text, int ``[N]``."""
        return self.cu_seqlens.diff()

    @property
    def width(self) -> int:
        """E, the width of a token's vector."""
        return self.values.shape[1]

    @property
    def mean_tokens(self) -> float:
        """Mean number of a text's tokens; 0 without texts."""
        return self.values.shape[0] / max(self.num_texts, 1)


class Extent(NamedTuple):
    """How many texts there are, active entries (0 where all entries are held) and tokens, and the
    most tokens of a text (0 where that is not known)."""

    texts: int
    entries: int
    tokens: int
    max_seqlen: int


class Representations(NamedTuple):
    """What an encoder makes of N texts; the fields that it has no use for stay empty.

    Attributes:
        sparse: fp32 ``[N, V]``, weights of terms or latents, not negative. Encoders give all
            entries; a training step may hold the active ones alone, and a collection does.
        tokens: one vector per token; a dense encoder's have one for each text.
        dense: one vector for each text, ``[N, D]``, beside other halves.
        losses: by name, fp32 ``[N]``: what the encoder itself wants to minimise of each text, such
            as the error of a reconstruction. Before ``Encoder.complete`` there may be more rows
            per text, ``[N, ...]``, of which it makes losses on the global batch.
        used: flags of any shape, set for what some of the texts used of an encoder that counts this
            in training; None of other encoders, and once ``Encoder.finish`` has been told what the
            whole batch used.
        score_weights: of queries: what the scores of each half count in the sum of all, where
            search adds them up; 1 where a half is not named.
    """

    sparse: Tensor | SparseVectors | None = None
    tokens: TokenVectors | None = None
    dense: TokenVectors | None = None
    losses: Mapping[str, Tensor] = {}
    used: Tensor | None = None
    score_weights: Mapping[str, float] = {}

    def __repr__(self) -> str:
        """What there is, and of which size: not the numbers, which would fill pages."""
        vectors = {"token vectors": self.tokens, "dense vectors": self.dense}
        shown = [f"{what} {(*x.values.shape,)}" for what, x in vectors.items() if x is not None]
        if self.sparse is not None:
            shown.insert(0, f"sparse vectors {(self.num_texts, self.width)}")
        return f"Representations({', '.join(shown)})"

    @property
    def num_texts(self) -> int:
        if isinstance(self.sparse, SparseVectors):
            return self.sparse.num_vectors
        if self.sparse is not None:
            return self.sparse.shape[0]
        vectors = self.dense if self.tokens is None else self.tokens
        assert vectors is not None, "representations of nothing"
        return vectors.num_texts

    @property
    def kinds(self) -> frozenset[Kind]:
        """Which halves there are."""
        return frozenset(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def width(self) -> int:
        """V; 0 where there is no sparse half."""
        if isinstance(self.sparse, SparseVectors):
            return self.sparse.width
        return 0 if self.sparse is None else self.sparse.shape[1]

    @property
    def extent(self) -> Extent:
        entries = self.sparse.num_entries if isinstance(self.sparse, SparseVectors) else 0
        if self.tokens is None:
            return Extent(self.num_texts, entries, 0, 0)
        tokens = self.tokens.values.shape[0]
        return Extent(self.num_texts, entries, tokens, self.tokens.max_seqlen or 0)

    @property
    def varies(self) -> bool:
        """Whether as many other texts, held alike, may have another extent."""
        return isinstance(self.sparse, SparseVectors) or self.tokens is not None

    def compact(self) -> "Representations":
        """The same, without a graph, with the active entries of the sparse half alone."""
        if not isinstance(self.sparse, Tensor):
            return self.detach()
        return self._replace(sparse=SparseVectors.from_dense(self.sparse)).detach()

    def expanded(self) -> "Representations":
        """The same with all entries of the sparse half."""
        if not isinstance(self.sparse, SparseVectors):
            return self
        return self._replace(sparse=self.sparse.dense())

    def leaves(self) -> list[Tensor]:
        """The tensors that gradients follow, in a fixed order."""
        found = []
        if self.sparse is not None:
            found.append(self.sparse if isinstance(self.sparse, Tensor) else self.sparse.values)
        found += [each.values for each in (self.tokens, self.dense) if each is not None]
        return [*found, *self.losses.values()]

    def with_leaves(self, leaves: Sequence[Tensor]) -> "Representations":
        """The same with other tensors in the order of :meth:`leaves`."""
        rest = list(leaves)
        sparse: Tensor | SparseVectors | None = None
        if isinstance(self.sparse, SparseVectors):
            sparse = self.sparse._replace(values=rest.pop(0), own=None)
        elif self.sparse is not None:
            sparse = rest.pop(0)
        tokens, dense = (
            each and each._replace(values=rest.pop(0)) for each in (self.tokens, self.dense)
        )
        losses = dict(zip(self.losses, rest, strict=True))
        return self._replace(sparse=sparse, tokens=tokens, dense=dense, losses=losses)

    def detach(self) -> "Representations":
        return self.with_leaves([leaf.detach() for leaf in self.leaves()])

    @classmethod
    def concatenate(cls, parts: Sequence["Representations"]) -> "Representations":
        """The texts of all parts, in order; all parts have the same fields, held alike."""
        if len(parts) == 1:
            return parts[0]
        tokens = [part.tokens for part in parts if part.tokens is not None]
        dense = [part.dense for part in parts if part.dense is not None]
        return cls(
            _concatenate([part.sparse for part in parts]),
            TokenVectors.concatenate(tokens) if tokens else None,
            TokenVectors.concatenate(dense) if dense else None,
            {name: torch.cat([part.losses[name] for part in parts]) for name in parts[0].losses},
            score_weights=parts[0].score_weights,
        )

    def take(self, texts: Tensor) -> "Representations":
        """The texts of these numbers, in the given order, where the sparse half holds its active
        entries alone; losses are left out."""
        return self._each(lambda half: half.take(texts))

    def slice(self, start: int, stop: int) -> "Representations":
        """Texts ``start : stop``, without a copy; otherwise as :meth:`take`."""
        return self._each(lambda half: half.slice(start, stop))

    def _each(self, cut: Callable[[Any], Any]) -> "Representations":
        assert not isinstance(self.sparse, Tensor), "only active entries can be cut"
        halves = {kind: cut(getattr(self, kind)) for kind in self.kinds}
        return Representations(**halves, score_weights=self.score_weights)

    def split(self, extents: Sequence[Extent]) -> list["Representations"]:
        """The inverse of :meth:`concatenate`, for parts of such extents; values are not copied."""
        texts, entries, tokens, _ = (list(sizes) for sizes in zip(*extents, strict=True))
        sparse: Sequence[Tensor | SparseVectors | None] = [None] * len(texts)
        if isinstance(self.sparse, SparseVectors):
            sparse = self.sparse.split(texts, entries)
        elif self.sparse is not None:
            sparse = self.sparse.split(texts)
        vectors: Sequence[TokenVectors | None] = [None] * len(texts)
        if self.tokens is not None:
            vectors = self.tokens.split(texts, tokens)
        dense: Sequence[TokenVectors | None] = [None] * len(texts)
        if self.dense is not None:
            dense = self.dense.split(texts, texts)
        losses = {name: loss.split(texts) for name, loss in self.losses.items()}
        return [
            Representations(
                *halves,
                {name: parts[row] for name, parts in losses.items()},
                score_weights=self.score_weights,
            )
            for row, halves in enumerate(zip(sparse, vectors, dense, strict=True))
        ]


def _concatenate(
    parts: Sequence[Tensor | SparseVectors | None],
) -> Tensor | SparseVectors | None:
    if all(isinstance(part, SparseVectors) for part in parts):
        return SparseVectors.concatenate([p for p in parts if isinstance(p, SparseVectors)])
    dense = [part for part in parts if isinstance(part, Tensor)]
    return torch.cat(dense) if dense else None
