"""MaxSim from hidden states for CPU tensors, in PyTorch, document by document.

Q queries, N documents, R query tokens, T packed tokens, H hidden, E embedding.
"""

from itertools import pairwise

import torch
from torch import Tensor

from sparton.kernels.maxsim.normalization_cpu import (
    normalize_tokens_backward_cpu,
    normalize_tokens_cpu,
)
from sparton.kernels.segment_max.host_boundaries import read_boundaries


@torch.autocast("cpu", enabled=False)
def search_hidden_cpu(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    query_mask: Tensor | None,
    mask: Tensor | None,
    num_queries: int,
    *,
    normalize: bool,
    argmax: bool,
    longest: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of :func:`~sparton.kernels.maxsim.hidden.search_hidden`; also takes
    float64, whose similarities and sums stay float64. ``longest`` makes no difference here."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    bounds = read_boundaries("document_cu_seqlens", cu_seqlens, len(hidden))
    maxima = queries.new_zeros(len(bounds) - 1, queries.shape[0], dtype=wide)
    winners = torch.full(maxima.shape, -1, dtype=torch.int32)
    for n, (start, stop) in enumerate(pairwise(bounds)):
        tokens = torch.arange(start, stop)
        if mask is not None:
            tokens = tokens[mask[start:stop]]
        if tokens.numel():
            embeddings = hidden[tokens] @ projection.T
            if normalize:
                embeddings = normalize_tokens_cpu(embeddings).to(hidden.dtype)
            best = (queries.to(wide) @ embeddings.to(wide).T).max(dim=1)
            maxima[n], winners[n] = best.values, tokens[best.indices].int()
    if query_mask is not None:
        maxima, winners = maxima.where(query_mask, 0), winners.where(query_mask, -1)
    shape = (maxima.shape[0], num_queries, queries.shape[0] // max(num_queries, 1))
    scores = maxima.view(shape).sum(2).T.float().contiguous()
    return scores, winners if argmax else winners.new_empty(0)


@torch.autocast("cpu", enabled=False)
def route_hidden_cpu(
    grad: Tensor,
    winners: Tensor,
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    longest: int | None,
    *,
    normalize: bool,
    need_queries: bool,
    need_hidden: bool,
    need_projection: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Arguments and results of :func:`~sparton.kernels.maxsim.hidden.route_hidden`."""
    projected = hidden @ projection.T
    wide = torch.promote_types(projected.dtype, torch.float32)
    unit = normalize_tokens_cpu(projected).to(projected.dtype) if normalize else projected
    through, dqueries = (x.new_zeros(x.shape, dtype=wide) for x in (projected, queries))
    length = queries.shape[0] // max(grad.shape[0], 1)
    for upstream, row in zip(grad.T, winners, strict=True):
        rows = (row >= 0).nonzero().squeeze(1)
        tokens, g = row[rows].long(), upstream[rows // length, None].to(wide)
        through.index_add_(0, tokens, g * queries[rows].to(wide))
        dqueries[rows] += g * unit[tokens].to(wide)
    if normalize:
        through = normalize_tokens_backward_cpu(through, projected)
    through = through.to(hidden.dtype)
    return (
        dqueries.to(queries.dtype) if need_queries else None,
        through @ projection if need_hidden else None,
        through.T @ hidden if need_projection else None,
    )
