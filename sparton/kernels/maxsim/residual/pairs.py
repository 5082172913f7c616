"""Pairs of a query and a compressed document: the operator, for inference.

P pairs, Q queries, N documents, T packed document tokens, W packed query tokens, E embedding.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sparton.kernels.maxsim.batches import listed_pairs
from sparton.kernels.maxsim.residual.cpu import pair_forward_cpu
from sparton.kernels.maxsim.residual.operands import contiguous
from sparton.kernels.operator import Operator


def _cuda() -> Callable[..., Tensor]:
    from sparton.kernels.maxsim.residual.pair_forward import pair_forward

    return pair_forward


def _fake(
    queries: Tensor,
    codes: Tensor,
    residuals: Tensor | None,
    inverse_norms: Tensor | None,
    centroids: Tensor,
    bucket_weights: Tensor | None,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    pairs: Tensor | None,
    *others: object,
) -> Tensor:
    count = query_cu_seqlens.shape[0] - 1 if pairs is None else pairs.shape[0]
    return queries.new_empty(count, dtype=torch.float32)


_operator = Operator("sparton::maxsim_residual_pairs", pair_forward_cpu, fake=_fake, cuda=_cuda)


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
    return _operator(*contiguous(*operands), normalize, dtype)
