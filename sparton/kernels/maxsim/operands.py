"""What MaxSim's operands must look like, and the one form that every version of it takes.

Q queries, N documents, K documents per query, P pairs, L tokens, E embedding, T packed tokens.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparton.kernels.boundaries import check_longest, int32_boundaries
from sparton.kernels.dispatch import needs_operators
from sparton.kernels.maxsim.boundaries import equal_cu_seqlens
from sparton.kernels.segment_max.operands import num_rows

Backward = Literal["auto", "lowmem", "unified"]
BACKWARDS = ("auto", "lowmem", "unified")


class MaxSimOperands(NamedTuple):
    """Tokens of both sides in rows, padded batches as well as packed ones.

    Attributes:
        queries: ``[Tq, E]``, or with these rows along several axes: to change the axes of a small
            batch takes as long as to score it.
        documents: ``[Td, E]``, likewise, the same float dtype.
        query_cu_seqlens: int32 ``[Q + 1]``, query q owns the rows from entry q to entry q + 1.
        document_cu_seqlens: int32 ``[N + 1]``.
        query_mask: bool ``[Tq]``, True at rows that take part; None if all do.
        document_mask: bool ``[Td]`` or None.
        per_query: None scores each query against all documents, ``[Q, N]``; K scores query q
            against documents ``q * K : (q + 1) * K``, ``[Q, K]``.
        query_length: tokens of each query, where all have as many and the host knows it, or None.
        longest_query, longest_document: most tokens of a query and of a document, where the host
            knows them, or None.
        verify: the longest are what a caller states; a forward sees to it that they are true.
    """

    queries: Tensor
    documents: Tensor
    query_cu_seqlens: Tensor
    document_cu_seqlens: Tensor
    query_mask: Tensor | None
    document_mask: Tensor | None
    per_query: int | None
    query_length: int | None = None
    longest_query: int | None = None
    longest_document: int | None = None
    verify: bool = False

    @property
    def scores_shape(self) -> tuple[int, int]:
        """``(Q, N)`` or ``(Q, K)``."""
        num_documents = self.document_cu_seqlens.shape[0] - 1
        columns = num_documents if self.per_query is None else self.per_query
        return self.query_cu_seqlens.shape[0] - 1, columns

    @property
    def num_query_tokens(self) -> int:
        """Tq."""
        return num_rows(self.queries)

    @property
    def argmax_shape(self) -> tuple[int, int]:
        """``(N, Tq)`` or ``(K, Tq)``: the winner of each query token in each column of scores."""
        return self.scores_shape[1], self.num_query_tokens

    def flat(self) -> "MaxSimOperands":
        """With queries ``[Tq, E]`` and documents ``[Td, E]``."""
        if self.queries.dim() == self.documents.dim() == 2:
            return self
        queries, documents = (x.reshape(-1, x.shape[-1]) for x in self[:2])
        return self._replace(queries=queries, documents=documents)


def check_backward(backward: str) -> None:
    if backward not in BACKWARDS:
        raise ValueError(f"backward must be one of {', '.join(BACKWARDS)}, got {backward!r}")


def _check_tensors(queries: Tensor, documents: Tensor, *others: Tensor | None) -> None:
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
                "queries, documents, masks and boundaries must be on one device, got "
                f"{', '.join(sorted(map(str, devices)))}"
            )


def check_precision(tokens: Tensor) -> None:
    """A float dtype that the kernels take."""
    if tokens.is_cuda and tokens.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"on a GPU MaxSim takes float16, bfloat16 or float32, got {tokens.dtype}; cast all"
        )


def check_rows(name: str, rows: int) -> None:
    """A number that int32 can count."""
    if rows >= 2**31:
        raise ValueError(
            f"{name} have {rows} tokens, and token numbers are int32 (fewer than 2**31); "
            "score the batch in parts"
        )


def check_mask(name: str, mask: Tensor, shape: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(
            f"{name} must be bool {tuple(shape)}, True at tokens that take part, got "
            f"{mask.dtype} {tuple(mask.shape)}; convert other dtypes with .bool()"
        )


def _equally_long(name: str, tokens: Tensor, cu_seqlens: Tensor, longest: int | None) -> bool:
    """Whether all sequences must be as long as the longest for their tokens to be so many. Tracers
    may not know how many there are."""
    if longest is None or needs_operators():
        return False
    total = tokens.shape[0]
    check_longest(name, longest, cu_seqlens, total)
    return longest * (cu_seqlens.shape[0] - 1) == total > 0


def padded_operands(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    pairs: bool = False,
) -> MaxSimOperands:
    """Padded batches as rows, after every check; reads no values.

    Args:
        queries: ``[Q, Lq, E]``.
        documents: ``[N, Ld, E]``, or ``[Q, K, Ld, E]``.
        query_mask: bool ``[Q, Lq]`` or None.
        document_mask: bool, the shape of documents without E, or None.
        pairs: documents are ``[Q, Ld, E]``, one for each query.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    query_shape, document_shape = queries.shape, documents.shape
    dims = len(document_shape)
    if len(query_shape) != 3 or (dims != 3 and (dims != 4 or pairs)):
        expected = "[P, Ld, E]" if pairs else "[N, Ld, E] or [Q, K, Ld, E]"
        raise ValueError(
            f"queries must be [Q, Lq, E] and documents {expected}, got "
            f"{tuple(query_shape)} and {tuple(document_shape)}"
        )
    _check_tensors(queries, documents, query_mask, document_mask)
    (Q, Lq, _), N, Ld = query_shape, document_shape[0], document_shape[-2]
    per_query = 1 if pairs else document_shape[1] if dims == 4 else None
    if per_query is not None:
        if N != Q:
            raise ValueError(
                f"{Q} queries need documents for each of them along the first axis, got "
                f"queries {tuple(query_shape)} and documents {tuple(document_shape)}"
            )
        N *= per_query
    Tq, Td = Q * Lq, N * Ld
    check_rows("queries", Tq)
    check_rows("documents", Td)
    if query_mask is not None:
        check_mask("query_mask", query_mask, query_shape[:-1])
        query_mask = query_mask.reshape(Tq)
    if document_mask is not None:
        check_mask("document_mask", document_mask, document_shape[:-1])
        document_mask = document_mask.reshape(Td)
    return MaxSimOperands(
        queries,
        documents,
        equal_cu_seqlens(Q, Lq, queries.device),
        equal_cu_seqlens(N, Ld, queries.device),
        query_mask,
        document_mask,
        per_query,
        query_length=Lq,
        longest_query=Lq,
        longest_document=Ld,
    )


def packed_operands(
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    pairing: str | int,
    query_max_seqlen: int | None = None,
    document_max_seqlen: int | None = None,
) -> MaxSimOperands:
    """Packed batches after every check; the arguments of ``maxsim_varlen``; reads no values.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an unknown pairing, numbers
            of queries and documents that the pairing does not allow, or more tokens than fit.
    """
    if queries.dim() != 2 or documents.dim() != 2:
        raise ValueError(
            "packed queries must be [Tq, E] and documents [Td, E], got "
            f"{tuple(queries.shape)} and {tuple(documents.shape)}"
        )
    query_cu_seqlens = int32_boundaries("query_cu_seqlens", query_cu_seqlens)
    document_cu_seqlens = int32_boundaries("document_cu_seqlens", document_cu_seqlens)
    bounds = (query_cu_seqlens, document_cu_seqlens)
    _check_tensors(queries, documents, *bounds, query_mask, document_mask)
    check_rows("queries", queries.shape[0])
    check_rows("documents", documents.shape[0])
    if query_mask is not None:
        check_mask("query_mask", query_mask, queries.shape[:1])
    if document_mask is not None:
        check_mask("document_mask", document_mask, documents.shape[:1])
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
    equal = _equally_long("query_max_seqlen", queries, query_cu_seqlens, query_max_seqlen)
    _equally_long("document_max_seqlen", documents, document_cu_seqlens, document_max_seqlen)
    return MaxSimOperands(
        queries,
        documents,
        *bounds,
        query_mask,
        document_mask,
        per_query,
        query_length=query_max_seqlen if equal else None,
        longest_query=query_max_seqlen,
        longest_document=document_max_seqlen,
        verify=query_max_seqlen is not None or document_max_seqlen is not None,
    )
