"""MaxSim of every query with every document as one matrix product that keeps maxima.

Q queries, N documents, T packed tokens, E embedding.

With all query tokens as rows, segment_max gives the maximum of every query token over every
document, and its winner. It also sums the maxima of each query where whole queries of equal length
fill its tiles; otherwise the maxima are stored, ``[N, Tq]``, and summed after it. The backward is
segment_max's, too: every gradient row is summed in one place, in a fixed order. Query tokens of any
number of queries fill its tiles, so short queries waste none of a tile and long ones need not be
cut. Masked document tokens are left out before the product. Masked query tokens are computed and
then left out of the sums; their winner is -1.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import KEPT_PLANS, Launch, cdiv
from sparton.kernels.maxsim.normalization import normalize_tokens, normalize_tokens_backward
from sparton.kernels.maxsim.operands import MaxSimOperands
from sparton.kernels.maxsim.packing import compact
from sparton.kernels.segment_max.backward import backward_of_checked
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from sparton.kernels.segment_max.forward import (
    Config,
    ForwardPlan,
    default_config,
    fit_descriptors,
    forward_of_checked,
    plan_forward,
    tokens_scaled,
    tuned_config,
)
from sparton.kernels.segment_max.operands import sequence_of_tokens

MAXIMA_AT_ONCE = 2**28
ROWS_APART = 256
BLOCK_N = 16
BLOCK_S = 32


@triton.jit(do_not_specialize=["N", "Tq", "first", "num_rows"])
def _scores_kernel(
    maxima_ptr, winners_ptr, query_cu_ptr, query_mask_ptr, document_rows_ptr, scores_ptr,
    argmax_ptr, N, Tq, first, num_rows,
    ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One query and BLOCK_N documents: the sum of the maxima of those of its tokens that are among
    the ``num_rows`` from ``first``, and their winners as rows of the given documents."""
    blocks = tl.cdiv(N, BLOCK_N)
    q = (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.maximum(tl.load(query_cu_ptr + q), first)
    stop = tl.minimum(tl.load(query_cu_ptr + q + 1), first + num_rows)
    total = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    for lo in range(start, stop, BLOCK_S):
        s = lo + tl.arange(0, BLOCK_S)
        inside = (n < N)[:, None] & (s < stop)[None, :]
        taken = inside
        if query_mask_ptr is not None:
            taken = taken & (tl.load(query_mask_ptr + s, s < stop, 0) != 0)[None, :]
        offs = n.to(tl.int64)[:, None] * num_rows + (s - first)[None, :]
        total += tl.load(maxima_ptr + offs, taken, 0.0)
        if argmax_ptr is not None:
            winner = tl.load(winners_ptr + offs, taken, -1)
            if document_rows_ptr is not None:
                winner = tl.load(document_rows_ptr + winner, winner >= 0, -1)
            tl.store(argmax_ptr + n.to(tl.int64)[:, None] * Tq + s[None, :], winner, inside)
    scores = tl.sum(total, 1)
    if ADD:
        scores += tl.load(scores_ptr + q * N + n, n < N, 0.0)
    tl.store(scores_ptr + q * N + n, scores, n < N)


def _document_side(
    operands: MaxSimOperands, normalize: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens that take part, their boundaries and, if masks move them, the rows they came from.
    The operands are flat unless all tokens take part as they are."""
    documents, rows = operands.documents.contiguous(), None
    cu_seqlens = operands.document_cu_seqlens.contiguous()
    if operands.document_mask is not None:
        rows, cu_seqlens = compact(operands.document_mask, cu_seqlens)
    if normalize:
        documents = normalize_tokens(documents, rows)
    elif rows is not None:
        documents = documents.index_select(0, rows)
    return documents, cu_seqlens, rows


def _add_up(
    maxima: Tensor,
    found: Tensor,
    operands: MaxSimOperands,
    rows: Tensor | None,
    scores: Tensor,
    winners: Tensor | None,
    first: int,
) -> None:
    """Add the maxima ``[N, num_rows]`` of query tokens from ``first`` on to the scores, and store
    their winners."""
    (N, num_rows), Q, mask = maxima.shape, scores.shape[0], operands.query_mask
    Launch(
        _scores_kernel, (Q * cdiv(N, BLOCK_N),), N, operands.num_query_tokens, first, num_rows,
        ADD=first > 0, BLOCK_N=BLOCK_N, BLOCK_S=BLOCK_S,
    )(
        maxima, found, operands.query_cu_seqlens.contiguous(),
        None if mask is None else mask.contiguous(), rows, scores, winners,
    )  # fmt: skip


def equal_queries_forward(
    documents: Tensor,
    queries: Tensor,
    cu_seqlens: Tensor,
    length: int,
    *,
    argmax: bool,
    scales: tuple[Tensor | None, Tensor] | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores fp32 ``[Q, N]`` and winners ``[N, Tq]``, or an empty tensor, of queries that have
    ``length`` tokens each, all of which take part. The maxima stay on the chip if whole queries
    fit into a tile. ``scales``: as in
    :func:`~sparton.kernels.segment_max.forward.segment_max_forward`."""
    N, fits = cu_seqlens.shape[0] - 1, fit_descriptors(documents, queries)
    if config is None and scales is None:
        config = tuned_config(documents, queries, N, "none", fits)
    plan, summed = _plan_equal_queries(
        N, documents.shape, queries.shape, documents.dtype, documents.device, fits, length, argmax,
        tokens_scaled(scales), config,
    )  # fmt: skip
    scores, winners = plan.run(documents, queries, None, cu_seqlens, scales)
    if not summed:
        scores = scores.view(scores.shape[0], -1, length).transpose(0, 1).sum(2)
    return scores, winners


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan_equal_queries(
    N: int, document_shape: torch.Size, query_shape: torch.Size, dtype: torch.dtype,
    device: torch.device, fits: bool, length: int, argmax: bool, scaled: bool,
    config: Config | None,
) -> tuple[ForwardPlan, bool]:  # fmt: skip
    """The maxima, and whether they come as sums of queries."""
    if config is None:
        config = default_config(dtype, device, fits, "max", "none", scaled)
    summed = length if config.block_v % length == 0 else 1
    Td, Tq, E = document_shape[:-1].numel(), query_shape[:-1].numel(), query_shape[-1]
    plan = plan_forward(
        config, N, Td, E, Tq, dtype.itemsize, device, fits, "max", "none", argmax, summed
    )
    return plan, summed > 1


def cross_forward(
    operands: MaxSimOperands, *, normalize: bool, argmax: bool, config: Config | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scores and winners of every query with every document.

    Args:
        operands: checked ones, without ``per_query``.
        normalize: L2-normalise the tokens of both sides first.
        argmax: whether the winners are wanted.
        config: of :func:`~sparton.kernels.segment_max.forward.segment_max_forward`.

    Returns:
        Scores fp32 ``[Q, N]``. Winners int32 ``[N, Tq]``, the row of ``documents`` that is best for
        a query token, the first of equals; -1 where the token is masked or the document has no
        tokens; None without argmax. The maxima of at most MAXIMA_AT_ONCE query tokens and
        documents exist at a time.
    """
    (Q, N), Tq = operands.scores_shape, operands.num_query_tokens
    device = operands.queries.device
    if not (Tq and N and operands.documents.numel()):
        nothing = torch.full((N, Tq), -1, dtype=torch.int32, device=device) if argmax else None
        return torch.zeros(Q, N, dtype=torch.float32, device=device), nothing
    step = max(MAXIMA_AT_ONCE // N // ROWS_APART, 1) * ROWS_APART
    whole, unmasked = step >= Tq, operands.query_mask is None
    if normalize or operands.document_mask is not None or not whole:
        operands = operands.flat()
    queries = normalize_tokens(operands.queries) if normalize else operands.queries.contiguous()
    documents, cu_seqlens, rows = _document_side(operands, normalize)
    # segment_max's winners need no change.
    final = whole and unmasked and rows is None
    if whole and unmasked and operands.query_length and (final or not argmax):
        scores, found = equal_queries_forward(
            documents, queries, cu_seqlens, operands.query_length, argmax=argmax, config=config
        )
        return scores, found if argmax else None
    winners = None
    if argmax and not final:
        winners = torch.empty((N, Tq), dtype=torch.int32, device=device)
    scores = torch.empty(Q, N, dtype=torch.float32, device=device)
    options: Any = {"activation": "none", "argmax": argmax, "config": config}
    for first in range(0, Tq, step):
        # Parts are rows: the operands are flat if there are several.
        part = queries if whole else queries[first : first + step]
        maxima, found = forward_of_checked(documents, part, None, cu_seqlens, **options)
        _add_up(maxima, found, operands, rows, scores, winners, first)
    return scores, found if argmax and final else winners


def cross_backward(
    grad: Tensor,
    argmax: Tensor,
    operands: MaxSimOperands,
    *,
    normalize: bool,
    need_queries: bool = True,
    need_documents: bool = True,
    config: BackwardConfig | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``sum(grad * scores)``: the same bits every time.

    Args:
        grad: ``[Q, N]``, any strides.
        argmax: int32 ``[N, Tq]``, what the forward returned.
        operands: those of the forward.
        normalize: of the forward.
        need_queries, need_documents: whether these gradients are wanted.
        config: of :func:`~sparton.kernels.segment_max.backward.segment_max_backward`.

    Returns:
        dqueries and ddocuments, of the operands' shapes (with ``normalize`` ``[T, E]``), None where
        not wanted. Sums run in fp32; the results are in the dtype of the operands.
    """
    if normalize:
        operands = operands.flat()
    queries, documents = operands.queries.contiguous(), operands.documents.contiguous()
    hidden, weight = documents, queries
    if normalize:
        hidden, weight = normalize_tokens(documents), normalize_tokens(queries)
    cu_seqlens = operands.document_cu_seqlens.contiguous()
    owners = None
    if operands.query_length is None:
        owners = sequence_of_tokens(operands.query_cu_seqlens, operands.num_query_tokens)
    ddocuments, dqueries, _ = backward_of_checked(
        grad.T, None, argmax.contiguous(), hidden, weight, cu_seqlens,
        need_hidden=need_documents, need_weight=need_queries, activation="none",
        summed=operands.query_length or 1, columns=owners, longest=operands.longest_document,
        config=config,
    )  # fmt: skip
    if normalize:
        if dqueries is not None:
            dqueries = normalize_tokens_backward(dqueries, queries)
        if ddocuments is not None:
            ddocuments = normalize_tokens_backward(ddocuments, documents)
    return dqueries, ddocuments
