"""Late interaction with compressed documents in PyTorch, for CPU tensors.

Q queries, N documents, T document tokens, W query tokens, E embedding, C centroids. Restored
embeddings exist for TOKENS_AT_ONCE tokens at a time, and SIMILARITIES_AT_ONCE similarities (or
those of one document token, and of centroid scores those of one document and a query token).
"""

from itertools import pairwise

import torch
from torch import Tensor

from sparton.kernels.boundaries import read_boundaries
from sparton.kernels.maxsim.codec import CompressedTokens, ResidualCodec, restore
from sparton.kernels.maxsim.normalization_cpu import normalize_tokens_cpu
from sparton.packing import ranges_within

TOKENS_AT_ONCE = 2**13
SIMILARITIES_AT_ONCE = 2**22


def _restored(documents: CompressedTokens, codec: ResidualCodec, where: slice | Tensor) -> Tensor:
    """Embeddings of some tokens, scaled by their inverse norms where there are any."""
    x = restore(codec, documents.codes[where], documents.residuals[where])
    if documents.inverse_norms is not None:
        x = x * documents.inverse_norms[where].float()[:, None]
    return x


def residual_inverse_norms_cpu(documents: CompressedTokens, codec: ResidualCodec) -> Tensor:
    """Arguments and result of
    :func:`~sparton.kernels.maxsim.residual.backward.residual_inverse_norms`."""
    plain = documents._replace(inverse_norms=None)
    firsts = range(0, documents.codes.numel(), TOKENS_AT_ONCE)
    norms = [_restored(plain, codec, slice(x, x + TOKENS_AT_ONCE)).norm(dim=1) for x in firsts]
    return torch.cat(
        [x.clamp_min(1e-12).reciprocal() for x in norms] or [torch.empty(0, dtype=torch.float32)]
    )


def _query_sums(maxima: Tensor, bounds: list[int]) -> Tensor:
    """Sums over each query's rows of ``[W, N]``."""
    return torch.stack([maxima[start:stop].sum(0) for start, stop in pairwise(bounds)])


@torch.autocast("cpu", enabled=False)
def residual_forward_cpu(
    queries: Tensor,
    documents: CompressedTokens,
    codec: ResidualCodec,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    dtype: torch.dtype | None = None,
    argmax: bool = True,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of
    :func:`~sparton.kernels.maxsim.residual.forward.residual_forward`. Works in fp32, in float64 for
    queries of that dtype; the scores are fp32 all the same."""
    W, T, rounded = queries.shape[0], documents.codes.shape[0], dtype or queries.dtype
    bounds = read_boundaries("document_cu_seqlens", document_cu_seqlens, T)
    query_bounds = read_boundaries("query_cu_seqlens", query_cu_seqlens, W)
    Q, N = len(query_bounds) - 1, len(bounds) - 1
    winners = torch.full((N, W) if argmax else (0,), -1, dtype=torch.int32)
    if Q == 0 or N == 0 or W == 0:
        return torch.zeros(Q, N, dtype=torch.float32), winners
    if normalize:
        queries = normalize_tokens_cpu(queries)
    columns = queries.to(rounded).to(torch.promote_types(rounded, torch.float32)).T
    maxima = columns.new_zeros(W, N)
    at_once = max(min(TOKENS_AT_ONCE, SIMILARITIES_AT_ONCE // W), 1)
    for n, (start, stop) in enumerate(pairwise(bounds)):
        best, winner = columns.new_full((W,), float("-inf")), torch.full((W,), -1)
        for first in range(start, stop, at_once):
            part = slice(first, min(first + at_once, stop))
            similarity = _restored(documents, codec, part).to(columns.dtype) @ columns
            if document_mask is not None:
                similarity.masked_fill_(~document_mask[part, None], float("-inf"))
            value, token = similarity.max(dim=0)
            better = (value > best) | (value.isnan() & ~best.isnan())
            winner = torch.where(better, token + (first - start), winner)
            best = torch.maximum(best, value)
        maxima[:, n] = best.masked_fill(winner < 0, 0.0)
        if argmax:
            winners[n] = winner
    if query_mask is not None:
        maxima[~query_mask] = 0.0
    return _query_sums(maxima, query_bounds).float(), winners


@torch.autocast("cpu", enabled=False)
def residual_backward_cpu(
    grad: Tensor,
    argmax: Tensor,
    documents: CompressedTokens,
    codec: ResidualCodec,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Arguments and results of
    :func:`~sparton.kernels.maxsim.residual.backward.residual_backward`."""
    N, W = argmax.shape
    work = torch.promote_types(dtype, torch.float32)
    dqueries = torch.zeros(W, codec.centroids.shape[1], dtype=work)
    scale = grad.repeat_interleave(query_cu_seqlens.diff().long(), dim=0).to(work)
    if query_mask is not None:
        scale = scale * query_mask[:, None]
    step = max(TOKENS_AT_ONCE // max(W, 1), 1)
    for n in range(0, N, step):
        winner = argmax[n : n + step]
        document, w = (winner >= 0).nonzero(as_tuple=True)
        tokens = document_cu_seqlens[n + document].long() + winner[document, w]
        x = _restored(documents, codec, tokens).to(work) * scale[w, n + document, None]
        dqueries.index_add_(0, w, x)
    return dqueries.to(dtype)


@torch.autocast("cpu", enabled=False)
def centroid_forward_cpu(
    queries: Tensor,
    codes: Tensor,
    centroids: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    normalize: bool,
) -> Tensor:
    """Arguments and result of
    :func:`~sparton.kernels.maxsim.residual.centroid_forward.centroid_forward`."""
    W, T = queries.shape[0], codes.shape[0]
    bounds = read_boundaries("document_cu_seqlens", document_cu_seqlens, T)
    query_bounds = read_boundaries("query_cu_seqlens", query_cu_seqlens, W)
    Q, N = len(query_bounds) - 1, len(bounds) - 1
    if Q == 0 or N == 0 or W == 0:
        return torch.zeros(Q, N, dtype=torch.float32)
    columns = queries.to(torch.promote_types(queries.dtype, torch.float32))
    if normalize:
        columns = normalize_tokens_cpu(columns)
    counts, kept = document_cu_seqlens.long().diff(), document_mask
    if kept is not None:
        before = torch.cat([counts.new_zeros(1), kept.cumsum(0)])
        counts = before[document_cu_seqlens.long()].diff()
    maxima = columns.new_zeros(W, N)
    at_once = max(SIMILARITIES_AT_ONCE // max(len(centroids), TOKENS_AT_ONCE), 1)
    for w in range(0, W, at_once):
        products = centroids.to(columns.dtype) @ columns[w : w + at_once].T
        for first, last in ranges_within(bounds, TOKENS_AT_ONCE):
            tokens, lengths = slice(bounds[first], bounds[last]), counts[first:last]
            own = codes[tokens] if kept is None else codes[tokens][kept[tokens]]
            best = torch.segment_reduce(products[own.long()], "max", lengths=lengths, axis=0)
            maxima[w : w + at_once, first:last] = best.where(lengths[:, None] > 0, 0).T
    if query_mask is not None:
        maxima[~query_mask] = 0.0
    return _query_sums(maxima, query_bounds).float()
