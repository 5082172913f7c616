"""What MaxSim's operands must look like, and the one form that every version of it takes.

Q queries, N documents, K documents per query, P pairs, L tokens, E embedding, T packed tokens.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sparton.kernels.dispatch import needs_operators
from sparton.kernels.segment_max.operands import num_rows

Backward = Literal["auto", "lowmem", "unified"]
BACKWARDS = get_args(Backward)


class MaxSimOperands(NamedTuple):
    """Tokens of both sides in rows, padded batches as well as packed ones.

    Attributes:
        queries: ``[Tq, E]``, or with these rows along several axes: to change the axes of a small
            batch takes as long as to score it.
        documents: ``[Td, E]`` in the same float dtype, or with these rows along several axes.
        query_cu_seqlens: int32 ``[Q + 1]``, query q owns the rows from entry q to entry q + 1.
        document_cu_seqlens: int32 ``[N + 1]``.
        query_mask: bool ``[Tq]``, True at rows that take part; None if all do.
        document_mask: bool ``[Td]`` or None.
        per_query: None scores each query against all documents, ``[Q, N]``; K scores query q
            against documents ``q * K : (q + 1) * K``, ``[Q, K]``.
        query_length: tokens of each query, where all have as many and the host knows it, or None.
        longest_document, longest_query: most tokens of a document and of a query, where the host
            knows them, or None.
        verify: the longest are what a caller states; a forward sees to it that they are true.
        pairs: int32 ``[P, 2]``, contiguous, scores query ``pairs[p, 0]`` against document
            ``pairs[p, 1]``, ``[P, 1]``, with ``per_query`` None; or None.
    """

    queries: Tensor
    documents: Tensor
    query_cu_seqlens: Tensor
    document_cu_seqlens: Tensor
    query_mask: Tensor | None
    document_mask: Tensor | None
    per_query: int | None
    query_length: int | None = None
    longest_document: int | None = None
    longest_query: int | None = None
    verify: bool = False
    pairs: Tensor | None = None

    @property
    def scores_shape(self) -> tuple[int, int]:
        """``(Q, N)``, ``(Q, K)`` or ``(P, 1)``."""
        if self.pairs is not None:
            return self.pairs.shape[0], 1
        num_documents = self.document_cu_seqlens.shape[0] - 1
        columns = num_documents if self.per_query is None else self.per_query
        return self.query_cu_seqlens.shape[0] - 1, columns

    @property
    def num_query_tokens(self) -> int:
        """Tq."""
        return num_rows(self.queries)

    @property
    def argmax_shape(self) -> tuple[int, int]:
        """``(N, Tq)`` or ``(K, Tq)``: the winner of each query token in each column of scores. Of
        pairs ``(P, L)``, L the longest query's tokens: the winners of the tokens of each pair's
        query come first in its row."""
        if self.pairs is not None:
            assert self.longest_query is not None
            return self.pairs.shape[0], self.longest_query
        return self.scores_shape[1], self.num_query_tokens

    def with_room_for_winners(self) -> "MaxSimOperands":
        """With the longest query, which the winners of pairs must have. To read it from the
        boundaries waits for the device, and tracers cannot.

        Raises:
            ValueError: a tracer runs.
        """
        if self.pairs is None or self.longest_query is not None:
            return self
        if needs_operators():
            raise ValueError(
                "gradients of a list of pairs need query_max_seqlen=, the most tokens of a query, "
                "under torch.compile and dispatch modes: it cannot be read from the boundaries "
                "there"
            )
        lengths = self.query_cu_seqlens.diff()
        return self._replace(longest_query=int(lengths.max()) if lengths.numel() else 0)

    def flat(self) -> "MaxSimOperands":
        """With queries ``[Tq, E]`` and documents ``[Td, E]``."""
        if self.queries.dim() == self.documents.dim() == 2:
            return self
        queries, documents = (x.reshape(-1, x.shape[-1]) for x in self[:2])
        return self._replace(queries=queries, documents=documents)


def check_backward(backward: str) -> None:
    if backward not in BACKWARDS:
        raise ValueError(f"backward must be one of {', '.join(BACKWARDS)}, got {backward!r}")


def check_tensors(queries: Tensor, documents: Tensor, *others: Tensor | None) -> None:
    """The same E, dtype and device; a dtype that is served."""
    E, dtype = queries.shape[-1], queries.dtype
    if documents.shape[-1] != E or not E:
        raise ValueError(
            "queries and documents must have the same embedding size E > 0, got "
            f"{tuple(queries.shape)} and {tuple(documents.shape)}"
        )
    if documents.dtype != dtype or not dtype.is_floating_point:
        raise ValueError(
            "queries and documents must have the same float dtype, got "
            f"{dtype} and {documents.dtype}; cast one, or run under torch.autocast"
        )
    check_precision(queries)
    check_devices(queries, documents, *others)


def check_devices(first: Tensor, *others: Tensor | None) -> None:
    device = first.device
    for x in others:
        if x is not None and x.device != device:
            devices = {x.device for x in (first, *others) if x is not None}
            raise ValueError(
                "queries, documents, masks, boundaries and pairs must be on one device, got "
                f"{', '.join(sorted(map(str, devices)))}"
            )


def check_precision(tokens: Tensor) -> None:
    """A float dtype that the kernels take."""
    if tokens.is_cuda and tokens.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"on a GPU MaxSim takes float16, bfloat16 or float32, got {tokens.dtype}; cast all"
        )


def check_mask(name: str, mask: Tensor | None, shape: tuple[int, ...]) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.shape != shape):
        raise ValueError(
            f"{name} must be bool {tuple(shape)}, True at tokens that take part, got "
            f"{mask.dtype} {tuple(mask.shape)}; convert other dtypes with .bool()"
        )


def taking_part(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Rows ``[T, E]`` with zeros in place of those that a mask ``[T]`` leaves out, which may be no
    numbers: times a gradient of zero they would be none."""
    return rows if mask is None else torch.where(mask[:, None], rows, 0)


def flat_mask(name: str, mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """A mask of this shape, checked, with one axis."""
    check_mask(name, mask, shape)
    return None if mask is None else mask.flatten()
