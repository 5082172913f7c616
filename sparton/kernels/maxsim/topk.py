"""The documents with the largest MaxSim of a collection of any size.

Q queries, N documents, T packed tokens, E embedding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.boundaries import (
    check_boundaries,
    int32_boundaries,
    ranges_within,
    read_boundaries,
)
from sparton.kernels.dispatch import needs_operators
from sparton.kernels.maxsim.function import maxsim_varlen
from sparton.kernels.maxsim.operands import check_mask
from sparton.kernels.sort_keys import from_keys, sort_keys

TOKENS_AT_ONCE = 2**22


class BestDocuments(NamedTuple):
    """The k best documents of each query, best first.

    Attributes:
        scores: fp32 ``[Q, k]``.
        documents: int64 ``[Q, k]``, different within a row.
    """

    scores: Tensor
    documents: Tensor


def keep_best(best: Tensor, scores: Tensor, first: int, k: int) -> Tensor:
    """The best so far, after a chunk of a collection was scored.

    Args:
        best: int64 ``[Q, kept]``, keys of the best documents so far, see
            :mod:`sparton.kernels.sort_keys`.
        scores: fp32 ``[Q, n]`` of documents ``first, first + 1, ...``.
        first: the first one's number.
        k: at least 1.

    Returns:
        keys of the best ``k`` of both, or of all if there are fewer; int64, the best first.
    """
    if not scores.is_cuda or needs_operators():
        keys = torch.cat((best, sort_keys(scores, first)), 1)
    else:
        from sparton.kernels.maxsim.topk_keys import keys_beside

        keys = keys_beside(scores, best, first)
    return keys.topk(min(k, keys.shape[1])).values


@torch.no_grad()
def maxsim_topk(
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    k: int,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> BestDocuments:
    """The k documents with the largest :func:`~sparton.kernels.maxsim.maxsim_varlen` of each query.

    Documents pass in chunks, whose scores are merged into the best k so far on the queries'
    device; equal scores go to the document that comes first, and NaN is larger than any number. The
    collection may lie on the CPU while the queries are on a GPU: its chunks are copied as they are
    needed. For inference: the result has no gradient.

    Args:
        queries: ``[Tq, E]``, Q queries end to end.
        documents: ``[Td, E]``, N documents end to end, on the device of the queries or on the CPU.
        query_cu_seqlens: int32 or int64 ``[Q + 1]``.
        document_cu_seqlens: int32 or int64 ``[N + 1]``, beside ``documents``. Its values are read
            once.
        k: from 1 to N.
        query_mask: bool ``[Tq]`` or None.
        document_mask: bool ``[Td]`` or None, beside ``documents``.
        normalize: L2-normalise the tokens of both sides.
        tokens_at_once: most document tokens of a chunk, unless one document has more.

    Raises:
        ValueError: k is no whole number in its range, or what
            :func:`~sparton.kernels.maxsim.maxsim_varlen` refuses.
    """
    N, Q = document_cu_seqlens.numel() - 1, query_cu_seqlens.numel() - 1
    if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= k <= N:
        raise ValueError(f"k must be a whole number from 1 to the N = {N} documents, got {k}")
    if documents.device.type != "cpu" and documents.device != queries.device:
        raise ValueError(
            f"documents must be on the CPU or where the queries are, {queries.device}, got "
            f"{documents.device}"
        )
    query_cu_seqlens = int32_boundaries("query_cu_seqlens", query_cu_seqlens)
    check_boundaries("document_cu_seqlens", document_cu_seqlens)
    check_mask("document_mask", document_mask, documents.shape[:1])
    bounds = read_boundaries("document_cu_seqlens", document_cu_seqlens, documents.shape[0])
    best = torch.empty(Q, 0, dtype=torch.int64, device=queries.device)
    for first, last in ranges_within(bounds, tokens_at_once):
        rows = slice(bounds[first], bounds[last])
        own_bounds = document_cu_seqlens[first : last + 1]
        chunk = (
            documents[rows],
            own_bounds - bounds[first] if bounds[first] else own_bounds,
            None if document_mask is None else document_mask[rows],
        )
        tokens, cu_seqlens, mask = (
            None if x is None else x.to(queries.device, non_blocking=True) for x in chunk
        )
        assert tokens is not None and cu_seqlens is not None
        scores = maxsim_varlen(
            queries, tokens, query_cu_seqlens, cu_seqlens, query_mask, mask, normalize=normalize
        )
        best = keep_best(best, scores, first, k)
    return BestDocuments(*from_keys(best))
