"""MaxSim from hidden states as a PyTorch operator.

Q queries, N documents, L tokens, R = Q * Lq query tokens, T packed tokens, H hidden, E embedding.

The forward keeps the winners alone. The backward projects the tokens again, T x E, reduces the
gradients to that shape, and ends in the Jacobian of the normalisation and two matrix products: no
gather of hidden states per query.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparton.kernels.segment_max.operands import cast_for_autocast

EPS = 1e-12


def _project(hidden: Tensor, projection: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
    """Embeddings in the operands' dtype ``[T, E]`` and the factors that normalised them, fp32 or
    wider ``[T, 1]``."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    embeddings = (hidden @ projection.T).to(wide)
    factor = embeddings.new_ones(hidden.shape[0], 1)
    if normalize:
        factor = 1 / embeddings.norm(dim=1, keepdim=True).clamp_min(EPS)
    return (embeddings * factor).to(hidden.dtype), factor


def _search_cpu(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor | None,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    bounds = cu_seqlens.tolist()
    maxima = queries.new_zeros(len(bounds) - 1, queries.shape[0], dtype=wide)
    winners = torch.full(maxima.shape, -1, dtype=torch.int32)
    for n, (start, stop) in enumerate(pairwise(bounds)):
        tokens = torch.arange(start, stop)
        if mask is not None:
            tokens = tokens[mask[start:stop]]
        if tokens.numel():
            embeddings, _ = _project(hidden[tokens], projection, normalize)
            best = (queries.to(wide) @ embeddings.to(wide).T).max(dim=1)
            maxima[n], winners[n] = best.values, tokens[best.indices].int()
    return maxima.float(), winners


@torch.library.custom_op("sparton::maxsim_from_hidden", mutates_args=())
def _search_op(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor | None,
    normalize: bool,
    argmax: bool,
) -> tuple[Tensor, Tensor]:
    operands = (queries, hidden, projection, cu_seqlens, mask)
    if not hidden.is_cuda:
        maxima, winners = _search_cpu(*operands, normalize)
        return maxima, winners if argmax else winners.new_empty(0)
    from sparton.kernels.maxsim.hidden import search_hidden

    return search_hidden(*operands, normalize=normalize, argmax=argmax)


@_search_op.register_fake
def _(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor | None,
    normalize: bool,
    argmax: bool,
) -> tuple[Tensor, Tensor]:
    shape = (cu_seqlens.shape[0] - 1, queries.shape[0])
    maxima = hidden.new_empty(shape, dtype=torch.float32)
    return maxima, hidden.new_empty(shape if argmax else (0,), dtype=torch.int32)


@torch.library.custom_op("sparton::maxsim_from_hidden_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    maxima: Tensor,
    winners: Tensor,
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    embeddings, factor = _project(hidden, projection, normalize)
    if hidden.is_cuda:
        from sparton.kernels.segment_max.backward import segment_max_backward

        through, dqueries, _ = segment_max_backward(
            grad, maxima, winners, embeddings, queries, cu_seqlens,
            bias_dtype=None, activation="none",
        )  # fmt: skip
        assert through is not None and dqueries is not None
    else:
        through, dqueries = _route_cpu(grad, winners, embeddings, queries)
    through = through.to(factor.dtype)
    if normalize:
        wide = embeddings.to(factor.dtype)
        through = (through - wide * (wide * through).sum(1, keepdim=True)) * factor
    through = through.to(hidden.dtype)
    return dqueries, through @ projection, through.T @ hidden


def _route_cpu(
    grad: Tensor, winners: Tensor, embeddings: Tensor, queries: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the embeddings and the queries, document by document."""
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    through, dqueries = (torch.zeros_like(x, dtype=wide) for x in (embeddings, queries))
    for upstream, row in zip(grad, winners, strict=True):
        rows = (row >= 0).nonzero().squeeze(1)
        tokens, g = row[rows].long(), upstream[rows, None].to(wide)
        through.index_add_(0, tokens, g * queries[rows].to(wide))
        dqueries[rows] += g * embeddings[tokens].to(wide)
    return through.to(embeddings.dtype), dqueries.to(queries.dtype)


@_backward_op.register_fake
def _(
    grad: Tensor,
    maxima: Tensor,
    winners: Tensor,
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(queries), torch.empty_like(hidden), torch.empty_like(projection)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    queries, hidden, projection, cu_seqlens, _, ctx.normalize, _ = inputs
    ctx.save_for_backward(*output, queries, hidden, projection, cu_seqlens)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _backward_op(grad, *ctx.saved_tensors, ctx.normalize)
    wanted = (
        x if need else None for x, need in zip(gradients, ctx.needs_input_grad[:3], strict=True)
    )
    return *wanted, None, None, None, None


_search_op.register_autograd(_backward, setup_context=_setup_context)


def maxsim_from_hidden(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    document_cu_seqlens: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """MaxSim of queries against documents that are given by their hidden states.

    ``score(q, d) = sum over the tokens s of q of max over the tokens t of d of <q_s, p_t>`` with
    ``p_t = projection @ hidden_t``, of unit length if ``normalize``; over tokens whose mask is
    True. Each token is projected once, and the projected tokens never reach global memory.

    Args:
        queries: ``[Q, Lq, E]`` float16, bfloat16 or float32: projected already, and normalised
            where that is wanted.
        hidden: ``[N, Ld, H]``, or packed ``[T, H]`` with ``document_cu_seqlens``; the same dtype
            (or any under autocast).
        projection: ``[E, H]``, likewise.
        query_mask: bool ``[Q, Lq]`` or None.
        document_mask: bool ``[N, Ld]`` or ``[T]``, holes allowed, or None.
        document_cu_seqlens: int32 ``[N + 1]``, from 0 to T.
        normalize: L2-normalise the projected tokens.

    Returns:
        fp32 ``[Q, N]``. Differentiable once, with respect to queries, hidden and projection, with
        gradients in the dtype of each and the same bits every time.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    queries, hidden, projection = cast_for_autocast(queries, hidden, projection)
    cu_seqlens = _check(queries, hidden, projection, query_mask, document_mask, document_cu_seqlens)
    (Q, Lq, E), N = queries.shape, cu_seqlens.shape[0] - 1
    operands = (queries.reshape(Q * Lq, E), hidden.reshape(-1, hidden.shape[-1]), projection)
    mask = None if document_mask is None else document_mask.reshape(-1)
    differentiate = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    maxima, _ = _search_op(*operands, cu_seqlens, mask, normalize, differentiate)
    maxima = maxima.view(N, Q, Lq)
    if query_mask is not None:
        maxima = maxima * query_mask
    return maxima.sum(2).T


def _check(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """The boundaries of the documents, or ValueError; reads no values."""
    if queries.dim() != 3 or hidden.dim() != (3 if cu_seqlens is None else 2):
        raise ValueError(
            "queries must be [Q, Lq, E] and hidden [N, Ld, H], or [T, H] with "
            f"document_cu_seqlens, got {tuple(queries.shape)} and {tuple(hidden.shape)}"
        )
    if projection.shape != (queries.shape[-1], hidden.shape[-1]):
        raise ValueError(
            f"projection must be [E, H] = [{queries.shape[-1]}, {hidden.shape[-1]}], got "
            f"{tuple(projection.shape)}"
        )
    if len({x.dtype for x in (queries, hidden, projection)}) > 1 or not hidden.is_floating_point():
        raise ValueError(
            "queries, hidden and projection must have the same float dtype, got "
            f"{queries.dtype}, {hidden.dtype}, {projection.dtype}; cast, or use torch.autocast"
        )
    for name, mask, shape in (
        ("query_mask", query_mask, queries.shape[:-1]),
        ("document_mask", document_mask, hidden.shape[:-1]),
    ):
        if mask is not None and (mask.dtype != torch.bool or mask.shape != shape):
            raise ValueError(
                f"{name} must be bool {tuple(shape)}, got {mask.dtype} {tuple(mask.shape)}"
            )
    if cu_seqlens is None:
        N, Ld = hidden.shape[:2]
        cu_seqlens = torch.arange(N + 1, dtype=torch.int32, device=hidden.device) * Ld
    elif cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or not cu_seqlens.numel():
        raise ValueError(
            f"document_cu_seqlens must be int32 [N + 1], got {cu_seqlens.dtype} "
            f"{tuple(cu_seqlens.shape)}"
        )
    tensors = (queries, hidden, projection, query_mask, document_mask, cu_seqlens)
    if len(devices := {x.device for x in tensors if x is not None}) > 1:
        raise ValueError(f"operands must be on one device, got {sorted(map(str, devices))}")
    return cu_seqlens
