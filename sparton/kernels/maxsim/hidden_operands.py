"""What MaxSim from hidden states is given, and what its backward needs of its forward.

Q queries, N documents, L tokens, R query tokens, T packed tokens, H hidden, E embedding.
"""

import math
from typing import NamedTuple

from torch import Tensor

from sparton.kernels.boundaries import check_rows, int32_boundaries
from sparton.kernels.maxsim.boundaries import equal_cu_seqlens
from sparton.kernels.maxsim.operands import (
    MaxSimOperands,
    check_devices,
    check_precision,
    flat_mask,
)


class HiddenOperands(NamedTuple):
    """Projected queries, and documents that are still to be projected; padded batches as well as
    packed ones.

    Attributes:
        queries: ``[Q, L, E]`` float16, bfloat16 or float32 (float64 on the CPU).
        hidden: ``[T, H]``, or these rows along several axes, the same dtype.
        projection: ``[E, H]``, the same dtype.
        bias: ``[E]`` that the projection adds, the same dtype, or None.
        cu_seqlens: int32 ``[N + 1]``, from 0 to T.
        query_mask: bool ``[R]`` of R = Q * L, True at query tokens that take part, or None.
        mask: bool ``[T]``, True at tokens of documents that take part, or None.
        longest: most tokens of a document where the host knows it, or None. The result is right
            whatever it says.
        normalize: give projected tokens unit length.
    """

    queries: Tensor
    hidden: Tensor
    projection: Tensor
    bias: Tensor | None
    cu_seqlens: Tensor
    query_mask: Tensor | None = None
    mask: Tensor | None = None
    longest: int | None = None
    normalize: bool = True

    def projected(self, tokens: Tensor) -> MaxSimOperands:
        """The same scores from projected tokens ``[T, E]``, along one axis or several."""
        Q, L, _ = self.queries.shape
        query_cu_seqlens = equal_cu_seqlens(Q, L, self.queries.device)
        return MaxSimOperands(
            self.queries, tokens, query_cu_seqlens, self.cu_seqlens, self.query_mask, self.mask,
            None, query_length=L, longest_document=self.longest,
        )  # fmt: skip


class Kept(NamedTuple):
    """What a backward needs of a forward.

    Attributes:
        winners: rows of ``hidden`` that won, int32 ``[N, R]``; -1 for a masked query token or a
            document without tokens.
        tokens: projected ones ``[T, E]``, along the axes of ``hidden``, in its dtype.
        norms: of the tokens before they were normalised, fp32 or wider ``[T]``; empty if they were
            not.
    """

    winners: Tensor
    tokens: Tensor
    norms: Tensor


def hidden_operands(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    bias: Tensor | None,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
) -> HiddenOperands:
    """The arguments of ``maxsim_from_hidden`` after every check; reads no values.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    query_shape, hidden_shape = queries.shape, hidden.shape
    padded = cu_seqlens is None
    if len(query_shape) != 3 or len(hidden_shape) != (3 if padded else 2):
        raise ValueError(
            "queries must be [Q, Lq, E] and hidden [N, Ld, H], or [T, H] with "
            f"document_cu_seqlens, got {tuple(query_shape)} and {tuple(hidden_shape)}"
        )
    _check_projection(queries, hidden, projection, bias)
    check_precision(hidden)
    check_rows("queries", query_shape[0] * query_shape[1])
    check_rows("documents", math.prod(hidden_shape[:-1]))
    query_mask = flat_mask("query_mask", query_mask, query_shape[:-1])
    document_mask = flat_mask("document_mask", document_mask, hidden_shape[:-1])
    if cu_seqlens is None:
        cu_seqlens = equal_cu_seqlens(hidden_shape[0], hidden_shape[1], hidden.device)
    else:
        cu_seqlens = int32_boundaries("document_cu_seqlens", cu_seqlens)
    check_devices(hidden, queries, projection, bias, query_mask, document_mask, cu_seqlens)
    return HiddenOperands(
        queries, hidden, projection, bias, cu_seqlens, query_mask, document_mask,
        hidden_shape[1] if padded else None, normalize,
    )  # fmt: skip


def _check_projection(
    queries: Tensor, hidden: Tensor, projection: Tensor, bias: Tensor | None
) -> None:
    """That it leads from hidden states to the queries' embeddings, all of one dtype."""
    E, H = queries.shape[-1], hidden.shape[-1]
    if projection.shape != (E, H) or not E:
        raise ValueError(
            f"projection must be [E, H] = [{E}, {H}] with E > 0, got {tuple(projection.shape)}"
        )
    if bias is not None and bias.shape != (E,):
        raise ValueError(f"bias must be [E] = [{E}] or None, got {tuple(bias.shape)}")
    dtype, of_bias = hidden.dtype, hidden.dtype if bias is None else bias.dtype
    if not (queries.dtype == projection.dtype == of_bias == dtype and dtype.is_floating_point):
        found = (str(x.dtype) for x in (queries, hidden, projection, bias) if x is not None)
        raise ValueError(
            "queries, hidden, projection and bias must have the same float dtype, got "
            f"{', '.join(found)}; cast, or use torch.autocast"
        )
