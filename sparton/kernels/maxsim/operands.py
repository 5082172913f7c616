"""What MaxSim's operands must look like, and the one flat form that every version of it takes.

Q queries, N documents, K documents per query, P pairs, L tokens, E embedding, T packed tokens.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Backward = Literal["auto", "lowmem", "unified"]
BACKWARDS = ("auto", "lowmem", "unified")


class MaxSimOperands(NamedTuple):
    """Tokens of both sides in rows, padded batches as well as packed ones.

    Attributes:
        queries: ``[Tq, E]``.
        documents: ``[Td, E]``, the same float dtype.
        query_cu_seqlens: int32 ``[Q + 1]``, query q owns the rows from entry q to entry q + 1.
        document_cu_seqlens: int32 ``[N + 1]``.
        query_mask: bool ``[Tq]``, True at rows that take part; None if all do.
        document_mask: bool ``[Td]`` or None.
        per_query: None scores each query against all documents, ``[Q, N]``; K scores query q
            against documents ``q * K : (q + 1) * K``, ``[Q, K]``.
    """

    queries: Tensor
    documents: Tensor
    query_cu_seqlens: Tensor
    document_cu_seqlens: Tensor
    query_mask: Tensor | None
    document_mask: Tensor | None
    per_query: int | None

    @property
    def scores_shape(self) -> tuple[int, int]:
        """``(Q, N)`` or ``(Q, K)``."""
        num_documents = self.document_cu_seqlens.shape[0] - 1
        columns = num_documents if self.per_query is None else self.per_query
        return self.query_cu_seqlens.shape[0] - 1, columns

    @property
    def argmax_shape(self) -> tuple[int, int]:
        """``(N, Tq)`` or ``(K, Tq)``: the winner of each query token in each column of scores."""
        return self.scores_shape[1], self.queries.shape[0]


def check_backward(backward: str) -> None:
    if backward not in BACKWARDS:
        raise ValueError(f"backward must be one of {', '.join(BACKWARDS)}, got {backward!r}")


def _check_tensors(queries: Tensor, documents: Tensor, *others: Tensor | None) -> None:
    """The same E, dtype and device; a number of rows that int32 can count."""
    if queries.shape[-1] != documents.shape[-1] or not queries.shape[-1]:
        raise ValueError(
            "queries and documents must have the same embedding size E > 0, got "
            f"{tuple(queries.shape)} and {tuple(documents.shape)}"
        )
    if queries.dtype != documents.dtype or not queries.is_floating_point():
        raise ValueError(
            "queries and documents must have the same float dtype, got "
            f"{queries.dtype} and {documents.dtype}; cast one, or run under torch.autocast"
        )
    if queries.is_cuda and queries.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"on a GPU MaxSim takes float16, bfloat16 or float32, got {queries.dtype}; cast both"
        )
    devices = {x.device for x in (queries, documents, *others) if x is not None}
    if len(devices) > 1:
        raise ValueError(
            "queries, documents, masks and boundaries must be on one device, got "
            f"{', '.join(sorted(map(str, devices)))}"
        )
    for name, x in (("queries", queries), ("documents", documents)):
        if (rows := x.shape[:-1].numel()) >= 2**31:
            raise ValueError(
                f"{name} have {rows} tokens, and token numbers are int32 (fewer than 2**31); "
                "score the batch in parts"
            )


def _check_mask(name: str, mask: Tensor | None, shape: torch.Size) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.shape != shape):
        raise ValueError(
            f"{name} must be bool {tuple(shape)}, True at tokens that take part, got "
            f"{mask.dtype} {tuple(mask.shape)}; convert other dtypes with .bool()"
        )


def _check_cu_seqlens(name: str, cu_seqlens: Tensor) -> None:
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"{name} must be int32 with one more entry than sequences, got "
            f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )


def _equal_cu_seqlens(count: int, length: int, device: torch.device) -> Tensor:
    if length == 0:
        return torch.zeros(count + 1, dtype=torch.int32, device=device)
    return torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device)


def padded_operands(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    *,
    pairs: bool = False,
) -> MaxSimOperands:
    """Flatten padded batches, after every check; reads no values.

    Args:
        queries: ``[Q, Lq, E]``.
        documents: ``[N, Ld, E]``, or ``[Q, K, Ld, E]``.
        query_mask: bool ``[Q, Lq]`` or None.
        document_mask: bool, the shape of documents without E, or None.
        pairs: documents are ``[Q, Ld, E]``, one for each query.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    if queries.dim() != 3 or documents.dim() not in ((3,) if pairs else (3, 4)):
        expected = "[P, Ld, E]" if pairs else "[N, Ld, E] or [Q, K, Ld, E]"
        raise ValueError(
            f"queries must be [Q, Lq, E] and documents {expected}, got "
            f"{tuple(queries.shape)} and {tuple(documents.shape)}"
        )
    _check_tensors(queries, documents, query_mask, document_mask)
    per_query = 1 if pairs else documents.shape[1] if documents.dim() == 4 else None
    if per_query is not None and documents.shape[0] != queries.shape[0]:
        raise ValueError(
            f"{queries.shape[0]} queries need documents for each of them along the first axis, got "
            f"queries {tuple(queries.shape)} and documents {tuple(documents.shape)}"
        )
    _check_mask("query_mask", query_mask, queries.shape[:-1])
    _check_mask("document_mask", document_mask, documents.shape[:-1])
    count = documents.shape[:-2].numel()
    return MaxSimOperands(
        queries.flatten(0, -2),
        documents.flatten(0, -2),
        _equal_cu_seqlens(queries.shape[0], queries.shape[1], queries.device),
        _equal_cu_seqlens(count, documents.shape[-2], queries.device),
        None if query_mask is None else query_mask.flatten(),
        None if document_mask is None else document_mask.flatten(),
        per_query,
    )


def packed_operands(
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    pairing: str | int,
) -> MaxSimOperands:
    """Packed batches after every check; the arguments of ``maxsim_varlen``; reads no values.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an unknown pairing, or
            numbers of queries and documents that the pairing does not allow.
    """
    if queries.dim() != 2 or documents.dim() != 2:
        raise ValueError(
            "packed queries must be [Tq, E] and documents [Td, E], got "
            f"{tuple(queries.shape)} and {tuple(documents.shape)}"
        )
    bounds = (query_cu_seqlens, document_cu_seqlens)
    _check_tensors(queries, documents, *bounds, query_mask, document_mask)
    _check_cu_seqlens("query_cu_seqlens", query_cu_seqlens)
    _check_cu_seqlens("document_cu_seqlens", document_cu_seqlens)
    _check_mask("query_mask", query_mask, queries.shape[:1])
    _check_mask("document_mask", document_mask, documents.shape[:1])
    named: dict[str | int, int | None] = {"cross": None, "pairs": 1}
    per_query = named.get(pairing, -1 if isinstance(pairing, str) else pairing)
    if per_query is not None:
        if per_query < 0:
            raise ValueError(
                'pairing must be "cross", "pairs" or the number of documents per query, got '
                f"{pairing!r}"
            )
        num_queries, num_documents = (x.shape[0] - 1 for x in bounds)
        if num_documents != num_queries * per_query:
            raise ValueError(
                f"pairing={pairing!r} of {num_queries} queries needs "
                f"{num_queries * per_query} documents, got {num_documents}"
            )
    return MaxSimOperands(queries, documents, *bounds, query_mask, document_mask, per_query)
