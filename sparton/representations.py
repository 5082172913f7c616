"""What encoders make of texts.

N texts, V terms, T packed tokens, E width of a token's vector.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenVectors(NamedTuple):
    """One vector per token of N texts, packed end to end: what MaxSim compares.

    Attributes:
        values: ``[T, E]``, L2-normalised where the encoder does so.
        cu_seqlens: int32 ``[N + 1]``, the boundaries of the texts.
        mask: bool ``[T]``, False where a token takes no part in MaxSim; None if all do.
    """

    values: Tensor
    cu_seqlens: Tensor
    mask: Tensor | None = None

    @property
    def num_texts(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @classmethod
    def concatenate(cls, parts: Sequence["TokenVectors"]) -> "TokenVectors":
        """The texts of all parts, in order; all have a mask or none has."""
        bounds, total = [parts[0].cu_seqlens[:1]], 0
        for part in parts:
            bounds.append(part.cu_seqlens[1:] + total)
            total += part.values.shape[0]
        masks = [part.mask for part in parts if part.mask is not None]
        return cls(
            torch.cat([part.values for part in parts]),
            torch.cat(bounds),
            torch.cat(masks) if masks else None,
        )


class Representations(NamedTuple):
    """What an encoder makes of N texts; the fields that it has no use for stay empty.

    Attributes:
        sparse: fp32 ``[N, V]``, weights of terms or latents, not negative.
        tokens: one vector per token.
        losses: by name, fp32 ``[N]``: what the encoder itself wants to minimise of each text, such
            as the error of a reconstruction. Before ``Encoder.complete`` there may be more rows
            per text, ``[N, ...]``, of which it makes losses on the global batch.
    """

    sparse: Tensor | None = None
    tokens: TokenVectors | None = None
    losses: Mapping[str, Tensor] = {}

    @property
    def num_texts(self) -> int:
        if self.sparse is not None:
            return self.sparse.shape[0]
        assert self.tokens is not None, "representations of nothing"
        return self.tokens.num_texts

    def leaves(self) -> list[Tensor]:
        """The tensors that gradients follow, in a fixed order."""
        found = [] if self.sparse is None else [self.sparse]
        if self.tokens is not None:
            found.append(self.tokens.values)
        return [*found, *self.losses.values()]

    def with_leaves(self, leaves: Sequence[Tensor]) -> "Representations":
        """The same with other tensors in the order of :meth:`leaves`."""
        rest = list(leaves)
        sparse = None if self.sparse is None else rest.pop(0)
        tokens = None if self.tokens is None else self.tokens._replace(values=rest.pop(0))
        return Representations(sparse, tokens, dict(zip(self.losses, rest, strict=True)))

    def detach(self) -> "Representations":
        return self.with_leaves([leaf.detach() for leaf in self.leaves()])

    @classmethod
    def concatenate(cls, parts: Sequence["Representations"]) -> "Representations":
        """The texts of all parts, in order; all parts have the same fields."""
        if len(parts) == 1:
            return parts[0]
        sparse = [part.sparse for part in parts if part.sparse is not None]
        tokens = [part.tokens for part in parts if part.tokens is not None]
        return cls(
            torch.cat(sparse) if sparse else None,
            TokenVectors.concatenate(tokens) if tokens else None,
            {name: torch.cat([part.losses[name] for part in parts]) for name in parts[0].losses},
        )
