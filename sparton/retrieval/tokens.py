"""Token vectors by rows. N texts, T tokens, E width of a vector."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.ranges import boundaries_of
from sparton.representations import TokenVectors

VectorDtype = Literal["float16", "float32"]
VECTOR_DTYPES: tuple[VectorDtype, ...] = ("float16", "float32")


class TokenRows(NamedTuple):
    """The token vectors of N texts end to end, on the host.

    Only tokens that take part in MaxSim are stored. Half precision, the default of
    :meth:`from_vectors`, rounds a component by at most 2^-11 of its size: the MaxSim of vectors of
    length 1 changes by less than 0.001 per query token, which reorders near ties only.

    Attributes:
        values: float16 or float32 ``[T, E]``.
        boundaries: int64 ``[N + 1]``, text n owns the rows ``boundaries[n] : boundaries[n + 1]``.
    """

    values: NDArray[np.float16] | NDArray[np.float32]
    boundaries: NDArray[np.int64]

    @classmethod
    def from_vectors(cls, vectors: TokenVectors, dtype: VectorDtype = "float16") -> "TokenRows":
        """Store the vectors that the mask leaves, of any float dtype and on any device.

        Raises:
            ValueError: a component is NaN, infinite or too large for ``dtype``.
        """
        bounds, values = vectors.cu_seqlens.long(), vectors.values
        if vectors.mask is not None:
            kept = torch.cat([bounds.new_zeros(1), vectors.mask.cumsum(0)])
            bounds, values = kept[bounds], values[vectors.mask]
        stored = values.to(getattr(torch, dtype))
        broken = (~stored.isfinite()).any(dim=1).nonzero().flatten()
        if broken.numel():
            text = int(torch.searchsorted(bounds, broken[0], right=True)) - 1
            worst = values[broken[0]].float().abs().max().item()
            cause = "the model diverged or overflowed its precision; evaluate an earlier checkpoint"
            if np.isfinite(worst):
                cause = f"{dtype} cannot hold it; store float32"
            raise ValueError(
                f"text {text} of a batch has a token vector with the component {worst:g}: {cause}"
            )
        return cls(stored.cpu().numpy(), bounds.cpu().numpy())

    @classmethod
    def concatenate(cls, parts: Sequence["TokenRows"]) -> "TokenRows":
        """The texts of all parts, in order. At least one part; all of the same width and dtype."""
        lengths = np.concatenate([part.row_lengths for part in parts])
        return cls(np.concatenate([part.values for part in parts]), boundaries_of(lengths))

    def take(self, rows: NDArray[np.int64]) -> "TokenRows":
        """The given texts, in the given order; -1 gives one without tokens."""
        lengths = np.where(rows < 0, 0, self.row_lengths[rows])
        boundaries = boundaries_of(lengths)
        places = np.repeat(self.boundaries[rows] - boundaries[:-1], lengths)
        return TokenRows(self.values[places + np.arange(boundaries[-1])], boundaries)

    def slice(self, start: int, stop: int) -> "TokenRows":
        """Texts ``start : stop``; their values are not copied."""
        first, last = self.boundaries[start], self.boundaries[stop]
        return TokenRows(self.values[first:last], self.boundaries[start : stop + 1] - first)

    def to(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Values ``[T, E]`` and int32 boundaries ``[N + 1]`` as tensors; on a CPU fp32 values, as
        it computes with no others."""
        values = torch.from_numpy(self.values).to(device)
        bounds = torch.from_numpy(self.boundaries.astype(np.int32)).to(device)
        return values.float() if device.type == "cpu" else values, bounds

    @property
    def num_rows(self) -> int:
        return len(self.boundaries) - 1

    @property
    def width(self) -> int:
        """E."""
        return self.values.shape[1]

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """Stored tokens of each text; int64 ``[N]``."""
        return np.diff(self.boundaries)

    @property
    def mean_vectors(self) -> float:
        """Mean number of stored vectors per text; 0 without texts."""
        return len(self.values) / max(self.num_rows, 1)
