"""MaxSim from hidden states as a PyTorch operator.

Q queries, N documents, L tokens, T packed tokens, H hidden, E embedding.

On a GPU one kernel projects, normalises and searches (hidden.py), and projected tokens stay on the
chip. A backward needs them again: where a gradient follows they are stored, E / H of the memory of
the hidden states, which autograd keeps in any case, and the products of many query tokens with them
are MaxSim's own. The backward reduces all gradients to T x E before they go back through the
projection: no gather of hidden states per query.
"""

import functools
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sparton.kernels.boundaries import int32_boundaries
from sparton.kernels.dispatch import cast_for_autocast, needs_operators, without_autocast
from sparton.kernels.maxsim.boundaries import equal_cu_seqlens
from sparton.kernels.maxsim.operands import (
    MaxSimOperands,
    check_devices,
    check_mask,
    check_precision,
    check_rows,
)
from sparton.kernels.maxsim.operators import in_shape, run_backward, run_forward
from sparton.kernels.maxsim.projection_cpu import project_tokens_backward_cpu, project_tokens_cpu


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    """Those of the search, and those around the products of projected tokens."""
    from sparton.kernels.maxsim import hidden, projection

    return hidden, projection


def _operands(
    queries: Tensor,
    tokens: Tensor,
    cu_seqlens: Tensor,
    longest: int | None,
    query_mask: Tensor | None = None,
    mask: Tensor | None = None,
) -> MaxSimOperands:
    Q, L, _ = queries.shape
    query_cu_seqlens = equal_cu_seqlens(Q, L, queries.device)
    return MaxSimOperands(
        queries, tokens, query_cu_seqlens, cu_seqlens, query_mask, mask, None, L, longest
    )


def _score(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    query_mask: Tensor | None,
    mask: Tensor | None,
    longest: int | None,
    normalize: bool,
    differentiate: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Scores; to differentiate also winners, projected tokens and their norms. See
    :func:`~sparton.kernels.maxsim.hidden.search_hidden`."""
    project = project_tokens_cpu
    if hidden.is_cuda:
        search, products = _kernels()
        if search.search_serves(queries, differentiate):
            return search.search_hidden(
                queries, hidden, projection, cu_seqlens, query_mask, mask,
                normalize=normalize, argmax=differentiate, longest=longest,
            )  # fmt: skip
        project = products.project_tokens
    tokens, norms = project(hidden, projection, normalize=normalize)
    operands = _operands(queries, tokens, cu_seqlens, longest, query_mask, mask)
    scores, winners = run_forward(operands, False, differentiate)
    return (scores, winners, tokens, norms) if differentiate else (scores, None, None, None)


def _differentiate(
    grad: Tensor,
    winners: Tensor,
    tokens: Tensor,
    norms: Tensor,
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    longest: int | None,
    normalize: bool,
    need_queries: bool,
    need_hidden: bool,
    need_projection: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, hidden and projection; empty where not wanted."""
    through_projection = project_tokens_backward_cpu
    if hidden.is_cuda:
        through_projection = _kernels()[1].project_tokens_backward
    dhidden = dprojection = None
    # A backward may run under an autocast that the forward did not see.
    with without_autocast(hidden.device):
        dqueries, dtokens = run_backward(
            grad, winners, _operands(queries, tokens, cu_seqlens, longest),
            False, "auto", need_queries, need_hidden or need_projection,
        )  # fmt: skip
        if dtokens is not None:
            dhidden, dprojection = through_projection(
                dtokens, tokens, norms, hidden.contiguous(), projection.contiguous(),
                normalize=normalize, need_hidden=need_hidden, need_projection=need_projection,
            )  # fmt: skip
    if dqueries is not None:
        dqueries = in_shape(dqueries, queries)
    found = (dqueries, dhidden, dprojection)
    first, second, third = (hidden.new_empty(0) if x is None else x for x in found)
    return first, second, third


@torch.library.custom_op("sparton::maxsim_from_hidden", mutates_args=())
def _score_op(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    query_mask: Tensor | None,
    mask: Tensor | None,
    longest: int | None,
    normalize: bool,
    differentiate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores, winners, tokens, norms = _score(
        queries, hidden, projection, cu_seqlens, query_mask, mask, longest, normalize, differentiate
    )
    if winners is None or tokens is None or norms is None:
        return scores, *_nothing(hidden)
    return scores, winners, tokens, norms


def _nothing(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the place of winners, tokens and norms: a schema knows no optional results."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    winners, norms = (hidden.new_empty(0, dtype=dtype) for dtype in (torch.int32, wide))
    return winners, hidden.new_empty(0), norms


@_score_op.register_fake
def _(
    queries: Tensor, hidden: Tensor, projection: Tensor, cu_seqlens: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (Q, L, E), N, rows = queries.shape, cu_seqlens.shape[0] - 1, hidden.shape[:-1]
    *_, normalize, differentiate = options
    scores = hidden.new_empty((Q, N), dtype=torch.float32)
    winners, tokens, norms = _nothing(hidden)
    if differentiate:
        winners, tokens = winners.new_empty((N, Q * L)), tokens.new_empty((*rows, E))
        norms = norms.new_empty(math.prod(rows) if normalize else 0)
    return scores, winners, tokens, norms


_backward_op = torch.library.custom_op(
    "sparton::maxsim_from_hidden_backward", _differentiate, mutates_args=()
)


@_backward_op.register_fake
def _(
    grad: Tensor, winners: Tensor, tokens: Tensor, norms: Tensor, queries: Tensor, hidden: Tensor,
    projection: Tensor, *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wanted = zip((queries, hidden, projection), options[-3:], strict=True)
    first, second, third = (x.new_empty(x.shape if need else (0,)) for x, need in wanted)
    return first, second, third


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    # Without the masks: masked tokens are no winners.
    ctx.save_for_backward(*output[1:], *inputs[:4])
    ctx.options = inputs[6:-1]


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    # Winners, tokens and norms have no gradient: it need not be made of zeros.
    ctx.set_materialize_grads(False)
    _save(ctx, inputs, output)


def _gradients(ctx: Any, grad: Tensor, differentiate: Any) -> tuple[Tensor | None, ...]:
    """Of queries, hidden and projection; None where not wanted."""
    needs = ctx.needs_input_grad[:3]
    gradients = differentiate(grad, *ctx.saved_tensors, *ctx.options, *needs)
    return tuple(x if need else None for x, need in zip(gradients, needs, strict=True))


_score_op.register_autograd(
    lambda ctx, grad, *_: (*_gradients(ctx, grad, _backward_op), *[None] * 6),
    setup_context=_setup_context,
)


class MaxSimFromHiddenFunction(torch.autograd.Function):
    """The operator for eager mode; ``call`` is its other arguments, in one, as autograd looks at
    each. A ``setup_context`` would have torch bind them by name at every call."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, hidden: Tensor, projection: Tensor, call: tuple
    ) -> Tensor:
        inputs = (queries, hidden, projection, *call)
        output = _score(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The operator refuses second derivatives where someone asks for them.
        registered = torch.is_grad_enabled() or needs_operators()
        return *_gradients(ctx, grad, _backward_op if registered else _differentiate), None


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
    True. Each token is projected once. On a GPU the projected tokens are kept for a backward alone;
    otherwise they never reach global memory, up to E = 2,048 in 16 bits and 1,024 in float32. (A
    GPU with less shared memory than Hopper may refuse more than 128.) A token that is not a number
    makes the scores it enters NaN; where a gradient follows, a GPU with 4,096 query tokens or more
    leaves its similarities out instead, as :func:`~sparton.kernels.maxsim.maxsim` does.

    Args:
        queries: ``[Q, Lq, E]`` float16, bfloat16 or float32: projected already, and normalised
            where that is wanted.
        hidden: ``[N, Ld, H]``, or packed ``[T, H]`` with ``document_cu_seqlens``; the same dtype
            (or any under autocast).
        projection: ``[E, H]``, likewise.
        query_mask: bool ``[Q, Lq]`` or None.
        document_mask: bool ``[N, Ld]`` or ``[T]``, holes allowed, or None.
        document_cu_seqlens: int32 or int64 ``[N + 1]``, from 0 to T.
        normalize: L2-normalise the projected tokens.

    Returns:
        fp32 ``[Q, N]``. Differentiable once, with respect to queries, hidden and projection, with
        gradients in the dtype of each and the same bits every time.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    queries, hidden, projection = cast_for_autocast(queries, hidden, projection)
    cu_seqlens = _check(queries, hidden, projection, query_mask, document_mask, document_cu_seqlens)
    differentiate = torch.is_grad_enabled() and (
        queries.requires_grad or hidden.requires_grad or projection.requires_grad
    )
    call = (
        cu_seqlens,
        None if query_mask is None else query_mask.flatten(),
        None if document_mask is None else document_mask.flatten(),
        hidden.shape[1] if hidden.dim() == 3 else None,
        normalize,
        differentiate,
    )
    if needs_operators():
        return _score_op(queries, hidden, projection, *call)[0]
    if differentiate:
        return MaxSimFromHiddenFunction.apply(queries, hidden, projection, call)
    return _score(queries, hidden, projection, *call)[0]


def _check(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """The boundaries of the documents, or ValueError; reads no values."""
    query_shape, hidden_shape = queries.shape, hidden.shape
    if len(query_shape) != 3 or len(hidden_shape) != (3 if cu_seqlens is None else 2):
        raise ValueError(
            "queries must be [Q, Lq, E] and hidden [N, Ld, H], or [T, H] with "
            f"document_cu_seqlens, got {tuple(query_shape)} and {tuple(hidden_shape)}"
        )
    E, H = query_shape[-1], hidden_shape[-1]
    if projection.shape != (E, H) or not E:
        raise ValueError(
            f"projection must be [E, H] = [{E}, {H}] with E > 0, got {tuple(projection.shape)}"
        )
    dtype = hidden.dtype
    if not (queries.dtype == projection.dtype == dtype and dtype.is_floating_point):
        raise ValueError(
            "queries, hidden and projection must have the same float dtype, got "
            f"{queries.dtype}, {dtype}, {projection.dtype}; cast, or use torch.autocast"
        )
    check_precision(hidden)
    check_rows("queries", query_shape[0] * query_shape[1])
    check_rows("documents", math.prod(hidden_shape[:-1]))
    if query_mask is not None:
        check_mask("query_mask", query_mask, query_shape[:-1])
    if document_mask is not None:
        check_mask("document_mask", document_mask, hidden_shape[:-1])
    if cu_seqlens is None:
        cu_seqlens = equal_cu_seqlens(hidden_shape[0], hidden_shape[1], hidden.device)
    else:
        cu_seqlens = int32_boundaries("document_cu_seqlens", cu_seqlens)
    check_devices(hidden, queries, projection, query_mask, document_mask, cu_seqlens)
    return cu_seqlens
