"""Late interaction with the centroids alone, to choose what is worth its residuals.

Q queries, N documents, T packed document tokens, W packed query tokens, E embedding, C centroids.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sparton.kernels.boundaries import check_boundaries
from sparton.kernels.maxsim.residual.cpu import centroid_forward_cpu
from sparton.kernels.maxsim.residual.operands import (
    check_centroids,
    check_codes,
    check_devices,
    check_mask,
    check_queries,
    contiguous,
)
from sparton.kernels.maxsim.residual.pairs import check_pairing, pair_scores
from sparton.kernels.operator import Operator


def _cuda() -> Callable[..., Tensor]:
    from sparton.kernels.maxsim.residual.centroid_forward import centroid_forward

    return centroid_forward


def _fake(
    queries: Tensor, codes: Tensor, centroids: Tensor, query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor, *others: object,
) -> Tensor:  # fmt: skip
    Q, N = query_cu_seqlens.shape[0] - 1, document_cu_seqlens.shape[0] - 1
    return queries.new_empty(Q, N, dtype=torch.float32)


_operator = Operator("sparton::maxsim_centroids", centroid_forward_cpu, fake=_fake, cuda=_cuda)


@torch.no_grad()
def maxsim_centroids(
    queries: Tensor,
    codes: Tensor,
    centroids: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    pairing: str | Tensor = "cross",
    normalize: bool = True,
) -> Tensor:
    """Late-interaction scores of packed documents whose tokens are taken for their centroids.

    ``scores[q, n]`` is the sum over the query's tokens s of the maximum over the document's tokens
    t of ``query[s] . centroid[code[t]]``: an approximation of
    :func:`~sparton.kernels.maxsim.maxsim_residual_varlen` that reads 4 bytes of a token. PLAID
    (https://arxiv.org/abs/2205.09707) keeps the candidates that score best in this way; where it
    also leaves out tokens whose centroids suit no query token, ``document_mask`` does. A document
    or query without tokens that take part scores 0. Products are made in fp32. For inference: the
    result has no gradient.

    Args:
        queries: ``[W, E]`` float16, bfloat16 or float32 (float64 on the CPU).
        codes: int32 or int64 ``[T]``, centroid ids.
        centroids: ``[C, E]``, any float dtype; taken as they are.
        query_cu_seqlens: int32 or int64 ``[Q + 1]``, boundaries of the queries; ascending from 0 to
            W.
        document_cu_seqlens: int32 or int64 ``[N + 1]``, boundaries of the documents; ascending from
            0 to T.
        query_mask, document_mask: bool ``[W]`` and ``[T]``, True for tokens that take part; None
            for all.
        pairing: as in :func:`~sparton.kernels.maxsim.maxsim_residual_varlen`.
        normalize: L2-normalise the queries.

    Returns:
        fp32 ``[Q, N]``; ``[P]`` of pairs.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an unknown pairing, and on a
            CPU boundaries that do not ascend from 0 to the number of tokens, or numbers in a list
            of pairs that there are not.
    """
    if queries.dim() != 2 or codes.dim() != 1:
        raise ValueError(
            "queries must be packed [W, E] and codes [T], got "
            f"{tuple(queries.shape)} and {tuple(codes.shape)}"
        )
    check_queries(queries)
    check_centroids("centroids", centroids, queries.shape[1])
    check_codes("codes", codes)
    check_boundaries("query_cu_seqlens", query_cu_seqlens)
    check_boundaries("document_cu_seqlens", document_cu_seqlens)
    check_mask("query_mask", query_mask, queries.shape[:1])
    check_mask("document_mask", document_mask, codes.shape)
    check_devices(
        queries=queries,
        codes=codes,
        centroids=centroids,
        query_cu_seqlens=query_cu_seqlens,
        document_cu_seqlens=document_cu_seqlens,
        query_mask=query_mask,
        document_mask=document_mask,
        pairing=pairing if isinstance(pairing, Tensor) else None,
    )
    if isinstance(pairing, Tensor) or pairing != "cross":
        bounds = query_cu_seqlens, document_cu_seqlens
        return pair_scores(
            queries, (codes, None, None), centroids, None, *bounds,
            check_pairing(pairing, *bounds), query_mask, document_mask,
            normalize=normalize, dtype=queries.dtype,
        )  # fmt: skip
    operands = (
        queries,
        codes,
        centroids,
        query_cu_seqlens,
        document_cu_seqlens,
        query_mask,
        document_mask,
    )
    return _operator(*contiguous(*operands), normalize)
