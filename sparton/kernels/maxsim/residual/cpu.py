"""Late interaction with compressed documents in PyTorch, for CPU tensors.

Q queries, N documents, T document tokens, W query tokens, E embedding, C centroids. Restored
embeddings exist for TOKENS_AT_ONCE tokens (or one document) at a time, and SIMILARITIES_AT_ONCE
similarities (or those of one document, and of centroid scores those with one query token).
"""

from itertools import pairwise

import torch
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of, ranges_within, read_boundaries, rows_of
from sparton.kernels.maxsim.codec import CompressedTokens, ResidualCodec, restore
from sparton.kernels.maxsim.cpu import read_pairs
from sparton.kernels.maxsim.normalization_cpu import normalize_tokens_cpu

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


def _columns(queries: Tensor, normalize: bool, rounded: torch.dtype) -> Tensor:
    """Query tokens as they are multiplied: rounded to a dtype, in fp32 or wider."""
    if normalize:
        queries = normalize_tokens_cpu(queries)
    return queries.to(rounded).to(torch.promote_types(rounded, torch.float32))


def _document_maxima(similarity: Tensor, lengths: Tensor) -> Tensor:
    """Maxima ``[n, W]`` of similarities ``[t, W]`` over the tokens of each document, minus infinity
    of none. (``torch.segment_reduce`` takes several times as long.)"""
    nothing = similarity.new_full((similarity.shape[1],), float("-inf"))
    documents = similarity.split(lengths.tolist())
    return torch.stack([x.amax(0) if len(x) else nothing for x in documents])


def _query_sums(maxima: Tensor, bounds: list[int]) -> Tensor:
    """Sums over each query's rows of ``[W, N]``."""
    return torch.stack([maxima[start:stop].sum(0) for start, stop in pairwise(bounds)])


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
    columns = _columns(queries, normalize, rounded).T
    scores = columns.new_zeros(Q, N)
    at_once = max(min(TOKENS_AT_ONCE, SIMILARITIES_AT_ONCE // W), 1)
    for first, last in ranges_within(bounds, at_once):
        part = slice(bounds[first], bounds[last])
        similarity = _restored(documents, codec, part).to(columns.dtype) @ columns
        if document_mask is not None:
            similarity.masked_fill_(~document_mask[part, None], float("-inf"))
        lengths = document_cu_seqlens[first : last + 1].diff()
        best = _document_maxima(similarity, lengths)
        found = best != float("-inf")
        maxima = best.where(found, 0).T
        if query_mask is not None:
            maxima = maxima.where(query_mask[:, None], 0)
        scores[:, first:last] = _query_sums(maxima, query_bounds)
        if argmax:
            for n, x in enumerate(similarity.split(lengths.tolist())):
                if len(x):
                    winners[first + n] = x.argmax(dim=0).where(found[n], -1)
    return scores.float(), winners


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


def pair_forward_cpu(
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
    """Arguments and result of
    :func:`~sparton.kernels.maxsim.residual.pair_forward.pair_forward`."""
    query_bounds = read_boundaries("query_cu_seqlens", query_cu_seqlens, queries.shape[0])
    read_boundaries("document_cu_seqlens", document_cu_seqlens, codes.shape[0])
    Q, N = query_cu_seqlens.shape[0] - 1, document_cu_seqlens.shape[0] - 1
    if pairs is None:
        pairs = torch.arange(Q)[:, None].expand(Q, 2)
    read_pairs(pairs, Q, N)
    asked, answers = pairs.long().unbind(1)
    documents = codec = None
    if residuals is None or bucket_weights is None:
        dtype = torch.promote_types(queries.dtype, torch.float32)
    else:
        documents = CompressedTokens(codes, residuals, inverse_norms)
        codec = ResidualCodec(centroids, bucket_weights, bucket_weights)
    columns = _columns(queries, normalize, dtype)
    scores = torch.zeros(len(pairs), dtype=torch.float32)
    lengths = document_cu_seqlens.diff()
    for q in asked.unique().tolist():
        own = slice(query_bounds[q], query_bounds[q + 1])
        query = columns[own] if query_mask is None else columns[own][query_mask[own]]
        products = query[:0] if documents else centroids.to(query.dtype) @ query.T
        places = (asked == q).nonzero().flatten()
        for first, last in ranges_within(cu_seqlens_of(lengths[answers[places]]), TOKENS_AT_ONCE):
            part = answers[places[first:last]]
            rows, _ = rows_of(part, document_cu_seqlens)
            if documents is None or codec is None:
                similarity = products[codes[rows].long()]
            else:
                similarity = _restored(documents, codec, rows).to(query.dtype) @ query.T
            if document_mask is not None:
                similarity.masked_fill_(~document_mask[rows, None], float("-inf"))
            best = _document_maxima(similarity, lengths[part])
            maxima = best.where(best != float("-inf"), 0)
            scores[places[first:last]] = maxima.sum(dim=1).float()
    return scores
