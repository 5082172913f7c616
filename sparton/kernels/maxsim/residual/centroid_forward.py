"""Scores of centroids alone on a GPU: the residual kernel without residuals.

Q queries, N documents, T document tokens, W query tokens (columns), E embedding, C centroids.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.dispatch import without_autocast
from sparton.kernels.launch import next_power_of_2
from sparton.kernels.maxsim.normalization import normalize_tokens
from sparton.kernels.maxsim.residual.forward import (
    COLUMNS_AT_ONCE,
    DEFAULT,
    PRODUCTS_AT_ONCE,
    search_columns,
)


def unit_columns(queries: Tensor, normalize: bool) -> Tensor:
    """Query tokens ``[W, E]`` in fp32, of unit length if asked for."""
    columns = queries.float()
    return normalize_tokens(columns) if normalize else columns


def centroid_products(columns: Tensor, centroids: Tensor, block_w: int) -> Tensor:
    """Products of ``[C, E]`` and ``[W, E]``, fp32 ``[C, columns]``; the number of columns is the
    next multiple of ``block_w``."""
    beyond = -len(columns) % block_w
    with without_autocast(columns.device):
        return centroids.float() @ F.pad(columns, (0, 0, 0, beyond)).T


def centroid_forward(
    queries: Tensor,
    codes: Tensor,
    centroids: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    normalize: bool,
) -> Tensor:
    """Launch the kernels.

    Args:
        queries: ``[W, E]`` float16, bfloat16 or float32, contiguous.
        codes: ``[T]``, contiguous.
        centroids: ``[C, E]``.
        query_cu_seqlens, document_cu_seqlens: int32 or int64 ``[Q + 1]`` and ``[N + 1]``.
        query_mask, document_mask: bool ``[W]`` and ``[T]``, contiguous, or None.
        normalize: L2-normalise the query tokens.

    Returns:
        fp32 ``[Q, N]``.
    """
    (W, E), C, device = queries.shape, centroids.shape[0], queries.device
    Q, N = query_cu_seqlens.shape[0] - 1, document_cu_seqlens.shape[0] - 1
    if N == 0 or W == 0:
        return torch.zeros(Q, N, dtype=torch.float32, device=device)
    scores = torch.empty(Q, N, dtype=torch.float32, device=device)
    columns, centroids = unit_columns(queries, normalize), centroids.float()
    block_w = max(min(next_power_of_2(W), DEFAULT.block_w), 16)
    at_once = max(min(PRODUCTS_AT_ONCE // C, COLUMNS_AT_ONCE) // block_w, 1) * block_w
    for first in range(0, W, at_once):
        last = min(first + at_once, W)
        products = centroid_products(columns[first:last], centroids, block_w)
        search_columns(
            None, products, (codes, None, None), None, (query_mask, document_mask),
            (query_cu_seqlens, document_cu_seqlens), scores, codes, first, last,
            E=E, P=0, NBITS=8, UNPACK="table", BLOCK_T=DEFAULT.block_t, BLOCK_W=block_w,
            BLOCK_P=16, ARGMAX=False, num_warps=DEFAULT.num_warps, num_stages=DEFAULT.num_stages,
        )  # fmt: skip
    return scores
