"""Padded and packed batches as MaxSim's operands, after every check.

Q queries, N documents, K documents per query, P pairs, L tokens, E embedding, T packed tokens.
"""

import torch
from torch import Tensor

from sparton.kernels.boundaries import (
    check_longest,
    check_rows,
    int32_boundaries,
    within_int32,
)
from sparton.kernels.dispatch import needs_operators
from sparton.kernels.maxsim.boundaries import equal_cu_seqlens
from sparton.kernels.maxsim.operands import (
    MaxSimOperands,
    check_mask,
    check_tensors,
    flat_mask,
)


def listed_pairs(pairs: Tensor) -> Tensor:
    """A list of pairs as the kernels read it: int32, contiguous."""
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "pairs must be int32 or int64 [P, 2], the numbers of a query and of a document in each "
            f"row, got {pairs.dtype} {tuple(pairs.shape)}"
        )
    pairs = within_int32(pairs)
    # One copy makes it both, where it is neither.
    return pairs.to(torch.int32, memory_format=torch.contiguous_format).contiguous()


def _equally_long(name: str, tokens: Tensor, cu_seqlens: Tensor, longest: int | None) -> bool:
    """Whether all sequences must be as long as the longest for their tokens to be so many. Tracers
    may not know how many there are."""
    if longest is None or needs_operators():
        return False
    total = tokens.shape[0]
    check_longest(name, longest, cu_seqlens, total)
    return longest * (cu_seqlens.shape[0] - 1) == total > 0


def _per_query(
    pairing: str | int, query_cu_seqlens: Tensor, document_cu_seqlens: Tensor
) -> int | None:
    """Documents per query, None for all; ValueError for a pairing that does not exist or that
    these numbers of queries and documents do not allow."""
    named: dict[str | int, int | None] = {"cross": None, "pairs": 1}
    per_query = named.get(pairing, -1 if isinstance(pairing, str) else pairing)
    if per_query is None:
        return None
    if per_query < 0:
        raise ValueError(
            'pairing must be "cross", "pairs", the number of documents per query or a list of '
            f"pairs [P, 2], got {pairing!r}"
        )
    num_queries, num_documents = (x.shape[0] - 1 for x in (query_cu_seqlens, document_cu_seqlens))
    if num_documents != num_queries * per_query:
        raise ValueError(
            f"pairing={pairing!r} of {num_queries} queries needs {num_queries * per_query} "
            f"documents, got {num_documents}"
        )
    return per_query


def _padded_per_query(
    queries: torch.Size, documents: torch.Size, pairs: bool | Tensor
) -> int | None:
    """Documents per query of padded batches of these shapes, None if there are none of a query's
    own; ValueError for shapes that do not fit."""
    lists = len(documents) == 4 and pairs is False
    if len(queries) != 3 or not (len(documents) == 3 or lists):
        expected = "[N, Ld, E] or [Q, K, Ld, E]" if pairs is False else "[N, Ld, E]"
        raise ValueError(
            f"queries must be [Q, Lq, E] and documents {expected}, got "
            f"{tuple(queries)} and {tuple(documents)}"
        )
    if isinstance(pairs, Tensor) or not (lists or pairs):
        return None
    if documents[0] != queries[0]:
        raise ValueError(
            f"{queries[0]} queries need documents for each of them along the first axis, got "
            f"queries {tuple(queries)} and documents {tuple(documents)}"
        )
    return documents[1] if lists else 1


def padded_operands(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    pairs: bool | Tensor = False,
) -> MaxSimOperands:
    """Padded batches as rows, after every check; reads no values.

    Args:
        queries: ``[Q, Lq, E]``.
        documents: ``[N, Ld, E]``, or ``[Q, K, Ld, E]``.
        query_mask: bool ``[Q, Lq]`` or None.
        document_mask: bool, the shape of documents without E, or None.
        pairs: True if documents are ``[Q, Ld, E]``, one for each query; or a list ``[P, 2]``, with
            documents ``[N, Ld, E]``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    query_shape, document_shape = queries.shape, documents.shape
    per_query = _padded_per_query(query_shape, document_shape, pairs)
    listed = listed_pairs(pairs) if isinstance(pairs, Tensor) else None
    check_tensors(queries, documents, query_mask, document_mask, listed)
    (Q, Lq, _), Ld = query_shape, document_shape[-2]
    N = document_shape[0] if per_query is None else Q * per_query
    check_rows("queries", Q * Lq)
    check_rows("documents", N * Ld)
    return MaxSimOperands(
        queries,
        documents,
        equal_cu_seqlens(Q, Lq, queries.device),
        equal_cu_seqlens(N, Ld, queries.device),
        flat_mask("query_mask", query_mask, query_shape[:-1]),
        flat_mask("document_mask", document_mask, document_shape[:-1]),
        per_query,
        query_length=Lq,
        longest_document=Ld,
        longest_query=Lq,
        pairs=listed,
    )


def packed_operands(
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    pairing: str | int | Tensor,
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
    listed = listed_pairs(pairing) if isinstance(pairing, Tensor) else None
    check_tensors(queries, documents, *bounds, query_mask, document_mask, listed)
    check_rows("queries", queries.shape[0])
    check_rows("documents", documents.shape[0])
    check_mask("query_mask", query_mask, queries.shape[:1])
    check_mask("document_mask", document_mask, documents.shape[:1])
    per_query = None if isinstance(pairing, Tensor) else _per_query(pairing, *bounds)
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
        longest_document=document_max_seqlen,
        longest_query=query_max_seqlen,
        verify=query_max_seqlen is not None or document_max_seqlen is not None,
        pairs=listed,
    )
