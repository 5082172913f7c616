"""Late interaction with compressed documents in PyTorch, for CPU tensors.

Q queries, N documents, T document tokens, W query tokens, E embedding, C centroids. Restored
embeddings exist for TOKENS_AT_ONCE tokens (or one document) at a time, and SIMILARITIES_AT_ONCE
similarities (or those of one document, and of centroid scores those with one query token).
"""

from itertools import pairwise

import torch
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of, ranges_within, read_boundaries, rows_of
from sparton.kernels.maxsim.codec import ResidualCodec, restore
from sparton.kernels.maxsim.cpu import read_pairs
from sparton.kernels.maxsim.normalization_cpu import normalize_tokens_cpu
from sparton.kernels.maxsim.residual.operands import ResidualOperands

TOKENS_AT_ONCE = 2**13
SIMILARITIES_AT_ONCE = 2**22


def _restored(operands: ResidualOperands, where: slice | Tensor) -> Tensor:
    """Embeddings of some tokens, scaled by their inverse norms where there are any."""
    assert operands.residuals is not None
    x = restore(operands.codec, operands.codes[where], operands.residuals[where])
    if operands.inverse_norms is not None:
        x = x * operands.inverse_norms[where].float()[:, None]
    return x


def residual_inverse_norms_cpu(
    codes: Tensor, residuals: Tensor, centroids: Tensor, bucket_weights: Tensor
) -> Tensor:
    """Arguments and result of
    :func:`~sparton.kernels.maxsim.residual.backward.residual_inverse_norms`."""
    codec = ResidualCodec(centroids, bucket_weights, bucket_weights)
    parts = zip(codes.split(TOKENS_AT_ONCE), residuals.split(TOKENS_AT_ONCE), strict=True)
    norms = [restore(codec, *part).norm(dim=1) for part in parts]
    return torch.cat([x.clamp_min(1e-12).reciprocal() for x in norms])


def _columns(queries: Tensor, normalize: bool, rounded: torch.dtype | None = None) -> Tensor:
    """Query tokens as they are multiplied: in fp32 or wider, perhaps rounded to a dtype before."""
    if normalize:
        queries = normalize_tokens_cpu(queries)
    if rounded is not None:
        queries = queries.to(rounded)
    return queries.to(torch.promote_types(queries.dtype, torch.float32))


def _document_maxima(similarity: Tensor, lengths: Tensor) -> Tensor:
    """Maxima ``[n, W]`` of similarities ``[t, W]`` over the tokens of each document, minus infinity
    of none. (``torch.segment_reduce`` takes several times as long.)"""
    nothing = similarity.new_full((similarity.shape[1],), float("-inf"))
    documents = similarity.split(lengths.tolist())
    return torch.stack([x.amax(0) if len(x) else nothing for x in documents])


def _query_sums(maxima: Tensor, bounds: list[int]) -> Tensor:
    """Sums over each query's rows of ``[W, N]``."""
    return torch.stack([maxima[start:stop].sum(0) for start, stop in pairwise(bounds)])


def _bounds(operands: ResidualOperands) -> tuple[list[int], list[int]]:
    """The boundaries of the queries and of the documents, which are checked on the way."""
    return (
        read_boundaries("query_cu_seqlens", operands.query_cu_seqlens, len(operands.queries)),
        read_boundaries("document_cu_seqlens", operands.document_cu_seqlens, len(operands.codes)),
    )


def residual_forward_cpu(
    operands: ResidualOperands,
    normalize: bool = False,
    dtype: torch.dtype | None = None,
    argmax: bool = True,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of
    :func:`~sparton.kernels.maxsim.residual.forward.residual_forward`. Works in fp32, in float64 for
    queries of that dtype; the scores are fp32 all the same."""
    (Q, N), W = operands.scores_shape, operands.queries.shape[0]
    query_bounds, bounds = _bounds(operands)
    winners = torch.full((N, W) if argmax else (0,), -1, dtype=torch.int32)
    if Q == 0 or N == 0 or W == 0:
        return torch.zeros(Q, N, dtype=torch.float32), winners
    columns = _columns(operands.queries, normalize, dtype or operands.queries.dtype).T
    scores = columns.new_zeros(Q, N)
    at_once = max(min(TOKENS_AT_ONCE, SIMILARITIES_AT_ONCE // W), 1)
    for first, last in ranges_within(bounds, at_once):
        part = slice(bounds[first], bounds[last])
        similarity = _restored(operands, part).to(columns.dtype) @ columns
        if operands.document_mask is not None:
            similarity.masked_fill_(~operands.document_mask[part, None], float("-inf"))
        lengths = operands.document_cu_seqlens[first : last + 1].diff()
        best = _document_maxima(similarity, lengths)
        found = best != float("-inf")
        maxima = best.where(found, 0).T
        if operands.query_mask is not None:
            maxima = maxima.where(operands.query_mask[:, None], 0)
        scores[:, first:last] = _query_sums(maxima, query_bounds)
        if argmax:
            for n, x in enumerate(similarity.split(lengths.tolist())):
                if len(x):
                    winners[first + n] = x.argmax(dim=0).where(found[n], -1)
    return scores.float(), winners


def residual_backward_cpu(
    grad: Tensor, argmax: Tensor, operands: ResidualOperands, *, dtype: torch.dtype
) -> Tensor:
    """Arguments and results of
    :func:`~sparton.kernels.maxsim.residual.backward.residual_backward`."""
    N, W = argmax.shape
    work = torch.promote_types(dtype, torch.float32)
    dqueries = torch.zeros(W, operands.centroids.shape[1], dtype=work)
    scale = grad.repeat_interleave(operands.query_cu_seqlens.diff().long(), dim=0).to(work)
    if operands.query_mask is not None:
        scale = scale * operands.query_mask[:, None]
    step = max(TOKENS_AT_ONCE // max(W, 1), 1)
    for n in range(0, N, step):
        winner = argmax[n : n + step]
        document, w = (winner >= 0).nonzero(as_tuple=True)
        tokens = operands.document_cu_seqlens[n + document].long() + winner[document, w]
        x = _restored(operands, tokens).to(work) * scale[w, n + document, None]
        dqueries.index_add_(0, w, x)
    return dqueries.to(dtype)


def centroid_forward_cpu(operands: ResidualOperands, normalize: bool) -> Tensor:
    """Arguments and result of
    :func:`~sparton.kernels.maxsim.residual.centroid_forward.centroid_forward`."""
    codes, centroids, kept = operands.codes, operands.centroids, operands.document_mask
    (Q, N), W = operands.scores_shape, operands.queries.shape[0]
    query_bounds, bounds = _bounds(operands)
    if Q == 0 or N == 0 or W == 0:
        return torch.zeros(Q, N, dtype=torch.float32)
    columns = _columns(operands.queries, normalize)
    starts = operands.document_cu_seqlens.long()
    if kept is not None:
        starts = cu_seqlens_of(kept)[starts]
    counts = starts.diff()
    maxima = columns.new_zeros(W, N)
    at_once = max(SIMILARITIES_AT_ONCE // max(len(centroids), TOKENS_AT_ONCE), 1)
    for w in range(0, W, at_once):
        products = centroids.to(columns.dtype) @ columns[w : w + at_once].T
        for first, last in ranges_within(bounds, TOKENS_AT_ONCE):
            tokens, lengths = slice(bounds[first], bounds[last]), counts[first:last]
            own = codes[tokens] if kept is None else codes[tokens][kept[tokens]]
            best = torch.segment_reduce(products[own.long()], "max", lengths=lengths, axis=0)
            maxima[w : w + at_once, first:last] = best.where(lengths[:, None] > 0, 0).T
    if operands.query_mask is not None:
        maxima[~operands.query_mask] = 0.0
    return _query_sums(maxima, query_bounds).float()


def pair_forward_cpu(
    operands: ResidualOperands, pairs: Tensor | None, normalize: bool, dtype: torch.dtype
) -> Tensor:
    """Arguments and result of
    :func:`~sparton.kernels.maxsim.residual.pair_forward.pair_forward`."""
    query_bounds, _ = _bounds(operands)
    Q, N = operands.scores_shape
    if pairs is None:
        pairs = torch.arange(Q)[:, None].expand(Q, 2)
    read_pairs(pairs, Q, N)
    asked, answers = pairs.long().unbind(1)
    alone, query_mask = operands.residuals is None, operands.query_mask
    columns = _columns(operands.queries, normalize, None if alone else dtype)
    scores = torch.zeros(len(pairs), dtype=torch.float32)
    lengths = operands.document_cu_seqlens.diff()
    for q in asked.unique().tolist():
        own = slice(query_bounds[q], query_bounds[q + 1])
        query = columns[own] if query_mask is None else columns[own][query_mask[own]]
        products = operands.centroids.to(query.dtype) @ query.T if alone else query[:0]
        places = (asked == q).nonzero().flatten()
        for first, last in ranges_within(cu_seqlens_of(lengths[answers[places]]), TOKENS_AT_ONCE):
            part = answers[places[first:last]]
            rows, _ = rows_of(part, operands.document_cu_seqlens)
            if alone:
                similarity = products[operands.codes[rows].long()]
            else:
                similarity = _restored(operands, rows).to(query.dtype) @ query.T
            if operands.document_mask is not None:
                similarity.masked_fill_(~operands.document_mask[rows, None], float("-inf"))
            best = _document_maxima(similarity, lengths[part])
            maxima = best.where(best != float("-inf"), 0)
            scores[places[first:last]] = maxima.sum(dim=1).float()
    return scores
