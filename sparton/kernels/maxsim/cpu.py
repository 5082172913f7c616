"""MaxSim for CPU tensors, in PyTorch: the similarities of a few rows and one document at a time, or
of few query tokens and many documents.

Q queries, N documents, K documents per query, C = N or K columns, P pairs, L tokens of the longest
query, T packed tokens, E embedding.
"""

from itertools import pairwise

import torch
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of, ranges_within, read_boundaries
from sparton.kernels.maxsim.normalization_cpu import (
    normalize_tokens_backward_cpu,
    normalize_tokens_cpu,
)
from sparton.kernels.maxsim.operands import MaxSimOperands
from sparton.kernels.segment_max.operands import sequence_of_tokens

SIMILARITIES_AT_ONCE = 2**22
OF_A_CORE = 2**17  # similarities of one document at once, which are in its cache
# Up to so many query tokens, many documents share a product: one by one they would take longer to
# start than to compute. So many similarities, and components of documents that fp32 is made of for
# them, are in a core's cache.
FEW_TOKENS, OF_FEW_TOKENS, COMPONENTS_OF_FEW = 64, 2**18, 2**20
MANY_OF_EACH = 2**11  # similarities of a document, from which on it is worth a call of its own
# A product computes its last rows in another way if they are fewer than so many: their last bits
# would depend on their place, and equal documents would not be equally good.
ROWS_ALIKE = 192
ENTRIES_AT_ONCE = 2**20


def _rows(tokens: Tensor, normalize: bool) -> Tensor:
    """In fp32 or wider, where products and sums happen, and of unit length if asked for."""
    if normalize:
        return normalize_tokens_cpu(tokens)
    return tokens.to(torch.promote_types(tokens.dtype, torch.float32))


def _best(queries: Tensor, document: Tensor, argmax: bool) -> tuple[Tensor, Tensor | None]:
    """Largest similarity of each query token and, with argmax, the first token that attains it."""
    tile = max(OF_A_CORE * torch.get_num_threads() // document.shape[0], 1)
    found = [
        (rows @ document.T).max(dim=1) if argmax else ((document @ rows.T).amax(dim=0), None)
        for rows in queries.split(tile)
    ]
    best, tokens = zip(*found, strict=True)
    return torch.cat(best), torch.cat(tokens) if argmax else None


def maxsim_forward_cpu(
    operands: MaxSimOperands, *, normalize: bool, argmax: bool
) -> tuple[Tensor, Tensor]:
    """Scores fp32 ``[Q, C]``, and the row of ``documents`` that won for each query token, int32
    ``[C, Tq]``: -1 at masked query tokens and for documents without tokens; empty without argmax.
    Where pairs are scored, the shapes are ``[P, 1]`` and ``[P, L]``, with -1 also beyond the tokens
    of a query.

    Also takes float64, whose similarities and sums stay float64; the scores are fp32 all the same.
    """
    operands = operands.flat()
    if operands.pairs is not None:
        return _pair_scores(operands, normalize, argmax)
    documents, mask, per_query = operands.documents, operands.document_mask, operands.per_query
    few = per_query is None and len(operands.queries) <= FEW_TOKENS
    if not argmax and (few or per_query is not None):
        scores = (_scores_of_few if few else _own_scores)(operands, normalize)
        return scores, torch.empty(0, dtype=torch.int32)
    queries = _rows(operands.queries, normalize)
    query_bounds, bounds = _read_boundaries(operands)
    owners = sequence_of_tokens(operands.query_cu_seqlens, queries.shape[0])
    kept = operands.query_mask
    if kept is None:
        kept = torch.ones_like(owners, dtype=torch.bool)
    scores = queries.new_zeros(operands.scores_shape)
    winners = torch.full(operands.argmax_shape if argmax else (0,), -1, dtype=torch.int32)
    for n in range(len(bounds) - 1):
        q, column = (0, n) if per_query is None else divmod(n, per_query)
        last = len(query_bounds) - 1 if per_query is None else q + 1
        rows = slice(query_bounds[q], query_bounds[last])
        own = slice(bounds[n], bounds[n + 1])
        document = documents[own] if mask is None else documents[own][mask[own]]
        if document.shape[0] == 0 or rows.start == rows.stop:
            continue
        best, token = _best(queries[rows], _rows(document, normalize), argmax)
        scores[q:last, column].index_add_(0, owners[rows] - q, best.where(kept[rows], 0))
        if token is not None:
            if mask is not None:
                token = mask[own].nonzero().squeeze(1)[token]
            winners[column, rows] = torch.where(kept[rows], token + own.start, -1).int()
    return scores.float(), winners


def _read_boundaries(operands: MaxSimOperands) -> tuple[list[int], list[int]]:
    """The boundaries of the queries and of the documents, which are checked on the way."""
    queries, documents, query_cu, document_cu, *_ = operands
    bounds = (
        read_boundaries("query_cu_seqlens", query_cu, len(queries)),
        read_boundaries("document_cu_seqlens", document_cu, len(documents)),
    )
    if operands.verify:
        _check_lengths("query", bounds[0], operands.longest_query)
        _check_lengths("document", bounds[1], operands.longest_document)
    return bounds


def _check_lengths(side: str, bounds: list[int], longest: int | None) -> None:
    for i, (start, stop) in enumerate(pairwise(bounds)):
        if longest is not None and stop - start > longest:
            raise ValueError(
                f"{side}_max_seqlen={longest}, but {side} {i} has {stop - start} tokens; state as "
                "many as the longest has, or None"
            )


def _pair_scores(operands: MaxSimOperands, normalize: bool, argmax: bool) -> tuple[Tensor, Tensor]:
    """Scores fp32 ``[P, 1]`` of a list of pairs, and winners int32 ``[P, L]``."""
    query_bounds, bounds = _read_boundaries(operands)
    queries, kept, mask = (
        _rows(operands.queries, normalize), operands.query_mask, operands.document_mask
    )  # fmt: skip
    scores = queries.new_zeros(operands.scores_shape)
    winners = torch.full(operands.argmax_shape if argmax else (0,), -1, dtype=torch.int32)
    for p, (q, n) in enumerate(_read_pairs(operands)):
        rows = slice(query_bounds[q], query_bounds[q + 1])
        own = slice(bounds[n], bounds[n + 1])
        document = operands.documents[own] if mask is None else operands.documents[own][mask[own]]
        if document.shape[0] == 0 or rows.start == rows.stop:
            continue
        best, token = _best(queries[rows], _rows(document, normalize), argmax)
        if kept is not None:
            best = best.where(kept[rows], 0)
        scores[p, 0] = best.sum()
        if token is not None:
            if mask is not None:
                token = mask[own].nonzero().squeeze(1)[token]
            token = token + own.start
            winners[p, : len(token)] = token if kept is None else token.where(kept[rows], -1)
    return scores.float(), winners


def _read_pairs(operands: MaxSimOperands) -> list[list[int]]:
    """ValueError unless they name queries and documents that there are."""
    assert operands.pairs is not None
    counts = (x.shape[0] - 1 for x in (operands.query_cu_seqlens, operands.document_cu_seqlens))
    return read_pairs(operands.pairs, *counts)


def read_pairs(pairs: Tensor, Q: int, N: int) -> list[list[int]]:
    """The values of a list ``[P, 2]`` of pairs.

    Raises:
        ValueError: they name a query or a document that there is not.
    """
    listed = pairs.tolist()
    for p, (q, n) in enumerate(listed):
        if not (0 <= q < Q and 0 <= n < N):
            raise ValueError(
                f"pairs name one of {Q} queries and one of {N} documents, from 0 on; pair {p} is "
                f"({q}, {n})"
            )
    return listed


def _counts(operands: MaxSimOperands) -> Tensor:
    """Tokens of each document that take part, int64 ``[N]``."""
    mask, boundaries = operands.document_mask, operands.document_cu_seqlens.long()
    if mask is None:
        return boundaries.diff()
    return cu_seqlens_of(mask)[boundaries].diff()


def _largest(
    queries: Tensor, operands: MaxSimOperands, tokens: slice, counts: Tensor, normalize: bool
) -> Tensor:
    """The largest similarity of each query token and each of n consecutive documents, ``[n, Tq]``;
    0 of documents without tokens."""
    documents = operands.documents[tokens]
    if operands.document_mask is not None:
        documents = documents[operands.document_mask[tokens]]
    T, E = documents.shape
    rows = queries.new_empty(-(-T // ROWS_ALIKE) * ROWS_ALIKE, E)
    rows[:T] = normalize_tokens_cpu(documents) if normalize else documents
    rows[T:] = 0
    similarities = (rows @ queries.T)[:T]
    if similarities.numel() >= MANY_OF_EACH * len(counts) and bool(counts.all()):
        return torch.stack([each.amax(dim=0) for each in similarities.split(counts.tolist())])
    best = torch.segment_reduce(similarities, "max", lengths=counts, axis=0)
    return best.where(counts[:, None] > 0, 0)


def _scores_of_few(operands: MaxSimOperands, normalize: bool) -> Tensor:
    """Scores fp32 ``[Q, N]`` of queries with few tokens in all, many documents in one product."""
    _, bounds = _read_boundaries(operands)
    queries, counts = _rows(operands.queries, normalize), _counts(operands)
    owners = sequence_of_tokens(operands.query_cu_seqlens, len(queries))
    if operands.query_mask is not None:
        queries, owners = queries[operands.query_mask], owners[operands.query_mask]
    scores = queries.new_zeros(operands.scores_shape)
    if len(queries):
        width = operands.documents.shape[1]
        fitting = min(OF_FEW_TOKENS // len(queries), COMPONENTS_OF_FEW // width)
        tokens_at_once = max(fitting, 1)
        for first, last in ranges_within(bounds, tokens_at_once):
            tokens = slice(bounds[first], bounds[last])
            best = _largest(queries, operands, tokens, counts[first:last], normalize)
            scores.T[first:last].index_add_(1, owners, best)
    return scores.float()


def _own_scores(operands: MaxSimOperands, normalize: bool) -> Tensor:
    """Scores fp32 ``[Q, K]`` of each query's own documents, many of them in one product."""
    query_bounds, bounds = _read_boundaries(operands)
    queries, K = _rows(operands.queries, normalize), operands.scores_shape[1]
    counts = _counts(operands)
    longest = max((stop - start for start, stop in pairwise(bounds)), default=0)
    scores = queries.new_zeros(operands.scores_shape)
    for q, own in enumerate(scores):
        rows = slice(query_bounds[q], query_bounds[q + 1])
        query = queries[rows]
        if operands.query_mask is not None:
            query = query[operands.query_mask[rows]]
        step = max(SIMILARITIES_AT_ONCE // max(len(query) * longest, 1), 1)
        for first in range(q * K, (q + 1) * K, step):
            last = min(first + step, (q + 1) * K)
            tokens = slice(bounds[first], bounds[last])
            best = _largest(query, operands, tokens, counts[first:last], normalize)
            own[first - q * K : last - q * K] = best.sum(dim=1)
    return scores.float()


def maxsim_backward_cpu(
    grad: Tensor,
    argmax: Tensor,
    operands: MaxSimOperands,
    *,
    normalize: bool,
    need_queries: bool = True,
    need_documents: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``sum(grad * scores)`` in the operands' dtypes, None where not wanted, as
    products with sparse ``[Td, Tq]`` matrices of at most ENTRIES_AT_ONCE winners (or one column's).
    """
    operands = operands.flat()
    queries, documents = (_rows(x, normalize) for x in operands[:2])
    dqueries = queries.new_zeros(queries.shape) if need_queries else None
    ddocuments = documents.new_zeros(documents.shape) if need_documents else None
    owners = sequence_of_tokens(operands.query_cu_seqlens, queries.shape[0])
    grad, pairs = grad.to(queries.dtype), operands.pairs
    step = max(ENTRIES_AT_ONCE // max(argmax.shape[1], 1), 1)
    size = (documents.shape[0], queries.shape[0])
    for first in range(0, argmax.shape[0], step):
        line, place = (argmax[first : first + step] >= 0).nonzero(as_tuple=True)
        line = line + first
        if pairs is None:
            row, g = place, grad[owners[place], line]
        else:
            row = operands.query_cu_seqlens[pairs[line, 0].long()].long() + place
            g = grad[line, 0]
        places = torch.stack((argmax[line, place].long(), row))
        winners = torch.sparse_coo_tensor(places, g, size, check_invariants=False)
        if dqueries is not None:
            dqueries += winners.T @ documents
        if ddocuments is not None:
            ddocuments += winners @ queries
    gradients = []
    for g_side, tokens in ((dqueries, operands.queries), (ddocuments, operands.documents)):
        if g_side is not None and normalize:
            g_side = normalize_tokens_backward_cpu(g_side, tokens)
        gradients.append(None if g_side is None else g_side.to(tokens.dtype))
    return gradients[0], gradients[1]
