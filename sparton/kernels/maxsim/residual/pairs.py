"""Pairs of a query and a compressed document: the operator, for inference.

P pairs, Q queries, N documents, T packed document tokens, W packed query tokens, E embedding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparton.kernels.dispatch import needs_operators
from sparton.kernels.maxsim.batches import listed_pairs
from sparton.kernels.maxsim.residual.cpu import pair_forward_cpu


def _forward(
    queries: Tensor,
    codes: Tensor,
    residuals: Tensor | None,
    inverse_norms: Tensor | None,
    centroids: Tensor,
    bucket_weights: Tensor | None,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    pairs: Tensor | None,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    normalize: bool,
    dtype: torch.dtype,
) -> Tensor:
    forward = pair_forward_cpu
    if queries.is_cuda:
        from sparton.kernels.maxsim.residual.pair_forward import pair_forward

        forward = pair_forward
    return forward(
        queries, codes, residuals, inverse_norms, centroids, bucket_weights, query_cu_seqlens,
        document_cu_seqlens, pairs, query_mask, document_mask, normalize, dtype,
    )  # fmt: skip


_forward_op = torch.library.custom_op("sparton::maxsim_residual_pairs", _forward, mutates_args=())


@_forward_op.register_fake
def _(queries: Tensor, *others: object) -> Tensor:
    *_, query_cu_seqlens, _, pairs, _, _, _, _ = others
    listed = query_cu_seqlens if pairs is None else pairs
    assert isinstance(listed, Tensor)
    return queries.new_empty(listed.shape[0] - (pairs is None), dtype=torch.float32)


def check_pairing(
    pairing: str | Tensor, query_cu_seqlens: Tensor, document_cu_seqlens: Tensor
) -> Tensor | None:
    """A list of pairs as the kernels read it; None for query p and document p.

    Raises:
        ValueError: no such pairing, or as many queries as documents are not there.
    """
    if isinstance(pairing, Tensor):
        return listed_pairs(pairing)
    if pairing != "pairs":
        raise ValueError(
            f'pairing must be "cross", "pairs" or a list of pairs [P, 2], got {pairing!r}'
        )
    Q, N = query_cu_seqlens.shape[0] - 1, document_cu_seqlens.shape[0] - 1
    if Q != N:
        raise ValueError(f'pairing="pairs" of {Q} queries needs {Q} documents, got {N}')
    return None


@torch.no_grad()
def pair_scores(
    queries: Tensor,
    documents: tuple[Tensor, Tensor | None, Tensor | None],
    centroids: Tensor,
    bucket_weights: Tensor | None,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    pairs: Tensor | None,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    *,
    normalize: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Checked operands to scores, fp32 ``[P]``; ``documents`` are codes, residuals and inverse
    norms. Without residuals and bucket weights, centroids alone are scored."""
    operands = (
        queries, *documents, centroids, bucket_weights, query_cu_seqlens, document_cu_seqlens,
        pairs, query_mask, document_mask,
    )  # fmt: skip
    contiguous: list[Any] = [x if x is None else x.contiguous() for x in operands]
    forward: Callable[..., Tensor] = _forward_op if needs_operators() else _forward
    return forward(*contiguous, normalize, dtype)
