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
from sparton.kernels.maxsim.residual.operands import ResidualOperands


def unit_columns(queries: Tensor, normalize: bool) -> Tensor:
    """Query tokens ``[W, E]`` in fp32, of unit length if asked for."""
    columns = queries.float()
    return normalize_tokens(columns) if normalize else columns


def centroid_products(columns: Tensor, centroids: Tensor, block_w: int) -> Tensor:
    """Products of ``[C, E]`` and ``[W, E]``, fp32 ``[C, columns]``; the number of columns is the
    next multiple of ``block_w``."""
    if beyond := -len(columns) % block_w:
        columns = F.pad(columns, (0, 0, 0, beyond))
    with without_autocast(columns.device):
        return centroids.float() @ columns.T


def centroid_forward(operands: ResidualOperands, normalize: bool) -> Tensor:
    """Launch the kernels: fp32 ``[Q, N]`` of contiguous operands, which have no residuals, with
    query tokens of unit length if asked for."""
    queries, centroids = operands.queries, operands.centroids.float()
    (W, E), C, (Q, N) = queries.shape, centroids.shape[0], operands.scores_shape
    if N == 0 or W == 0:
        return torch.zeros(Q, N, dtype=torch.float32, device=queries.device)
    scores = torch.empty(Q, N, dtype=torch.float32, device=queries.device)
    columns, no_winners = unit_columns(queries, normalize), operands.codes
    block_w = max(min(next_power_of_2(W), DEFAULT.block_w), 16)
    at_once = max(min(PRODUCTS_AT_ONCE // C, COLUMNS_AT_ONCE) // block_w, 1) * block_w
    for first in range(0, W, at_once):
        last = min(first + at_once, W)
        products = centroid_products(columns[first:last], centroids, block_w)
        search_columns(
            operands, None, products, None, scores, no_winners, first, last,
            E=E, P=0, NBITS=8, UNPACK="table", BLOCK_T=DEFAULT.block_t, BLOCK_W=block_w,
            BLOCK_P=16, ARGMAX=False, num_warps=DEFAULT.num_warps, num_stages=DEFAULT.num_stages,
        )  # fmt: skip
    return scores
