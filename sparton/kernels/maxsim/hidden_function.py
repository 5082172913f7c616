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
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sparton.kernels.dispatch import cast_for_autocast, needs_operators, without_autocast
from sparton.kernels.maxsim.hidden_operands import HiddenOperands, Kept, hidden_operands
from sparton.kernels.maxsim.operators import in_shape, run_backward, run_forward
from sparton.kernels.maxsim.projection_cpu import project_tokens_backward_cpu, project_tokens_cpu


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    """The kernels of the search, and those around the products of projected tokens."""
    from sparton.kernels.maxsim import hidden, projection

    return hidden, projection


def _score(operands: HiddenOperands, differentiate: bool) -> tuple[Tensor, Kept | None]:
    """Scores, and what a backward needs, or None."""
    project = project_tokens_cpu
    if operands.hidden.is_cuda:
        search, products = _kernels()
        if search.search_serves(operands.queries, differentiate):
            return search.search_hidden(operands, argmax=differentiate)
        project = products.project_tokens
    _, hidden, projection, bias, *_ = operands
    tokens, norms = project(hidden, projection, bias, normalize=operands.normalize)
    scores, winners = run_forward(operands.projected(tokens), False, differentiate)
    if winners is None or not differentiate:
        return scores, None
    return scores, Kept(winners, tokens, norms)


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
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of queries, hidden, projection and bias: of those that ``needs`` names, in this
    order."""
    # Masked tokens are no winners: a backward needs no masks.
    operands = HiddenOperands(queries, hidden, projection, None, cu_seqlens, longest=longest)
    need_queries, *needs_behind = needs
    through_projection = project_tokens_backward_cpu
    if hidden.is_cuda:
        through_projection = _kernels()[1].project_tokens_backward
    behind: tuple[Tensor | None, ...] = ()
    # A backward may run under an autocast that the forward did not see.
    with without_autocast(hidden.device):
        dqueries, dtokens = run_backward(
            grad, winners, operands.projected(tokens),
            False, "auto", need_queries, any(needs_behind),
        )  # fmt: skip
        if dtokens is not None:
            behind = through_projection(
                dtokens, tokens, norms, hidden.contiguous(), projection.contiguous(), *needs_behind
            )
    if dqueries is not None:
        dqueries = in_shape(dqueries, queries)
    return [x for x in (dqueries, *behind) if x is not None]


@torch.library.custom_op("sparton::maxsim_from_hidden", mutates_args=())
def _score_op(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    query_mask: Tensor | None,
    mask: Tensor | None,
    longest: int | None,
    normalize: bool,
    differentiate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operands = HiddenOperands(
        queries, hidden, projection, bias, cu_seqlens, query_mask, mask, longest, normalize
    )
    scores, kept = _score(operands, differentiate)
    winners, tokens, norms = kept or _nothing(hidden)
    return scores, winners, tokens, norms


def _nothing(hidden: Tensor) -> Kept:
    """A schema knows no optional results."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    winners, norms = (hidden.new_empty(0, dtype=dtype) for dtype in (torch.int32, wide))
    return Kept(winners, hidden.new_empty(0), norms)


@_score_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *inputs, differentiate = arguments
    operands = HiddenOperands(*inputs)
    hidden, (Q, L, E) = operands.hidden, operands.queries.shape
    N, rows = operands.cu_seqlens.shape[0] - 1, hidden.shape[:-1]
    scores = hidden.new_empty((Q, N), dtype=torch.float32)
    winners, tokens, norms = _nothing(hidden)
    if differentiate:
        winners, tokens = winners.new_empty((N, Q * L)), tokens.new_empty((*rows, E))
        norms = norms.new_empty(math.prod(rows) if operands.normalize else 0)
    return scores, winners, tokens, norms


_backward_op = torch.library.custom_op(
    "sparton::maxsim_from_hidden_backward", _differentiate, mutates_args=()
)


@_backward_op.register_fake
def _(*arguments: Any) -> list[Tensor]:
    _, _, _, _, queries, hidden, projection, _, _, needs = arguments
    shapes = (queries.shape, hidden.shape, projection.shape, projection.shape[:1])
    return [hidden.new_empty(x) for x, need in zip(shapes, needs) if need]


def _save(ctx: Any, operands: HiddenOperands, kept: Kept) -> None:
    ctx.save_for_backward(*kept, *operands[:3], operands.cu_seqlens)
    ctx.longest = operands.longest


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    # Winners, tokens and norms have no gradient: it need not be made of zeros.
    ctx.set_materialize_grads(False)
    _save(ctx, HiddenOperands(*inputs[:-1]), Kept(*output[1:]))


def _gradients(
    ctx: Any, grad: Tensor, differentiate: Callable[..., list[Tensor]]
) -> list[Tensor | None]:
    """The gradients of queries, hidden, projection and bias; None where one is not wanted."""
    needs = list(ctx.needs_input_grad[:4])
    found = iter(differentiate(grad, *ctx.saved_tensors, ctx.longest, needs))
    return [next(found) if need else None for need in needs]


_score_op.register_autograd(
    lambda ctx, grad, *_: (*_gradients(ctx, grad, _backward_op), *[None] * 6),
    setup_context=_setup_context,
)


class MaxSimFromHiddenFunction(torch.autograd.Function):
    """The operator for eager mode; its arguments once more in one, as autograd looks at each. A
    ``setup_context`` would have torch bind them by name at every call."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        hidden: Tensor,
        projection: Tensor,
        bias: Tensor | None,
        operands: HiddenOperands,
    ) -> Tensor:
        scores, kept = _score(operands, True)
        assert kept is not None
        _save(ctx, operands, kept)
        return scores

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
    bias: Tensor | None = None,
    document_cu_seqlens: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """MaxSim of queries against documents that are given by their hidden states.

    ``score(q, d) = sum over the tokens s of q of max over the tokens t of d of <q_s, p_t>`` with
    ``p_t = projection @ hidden_t + bias``, of unit length if ``normalize``; over tokens whose mask
    is True. Each token is projected once. On a GPU the projected tokens are kept for a backward
    alone; otherwise they never reach global memory, up to E = 2,048 in 16 bits and 1,024 in
    float32. (A GPU with less shared memory than Hopper may refuse more than 128.) A token that is
    not a number makes the scores it enters NaN; where a gradient follows, a GPU with 4,096 query
    tokens or more leaves its similarities out instead, as :func:`~sparton.kernels.maxsim.maxsim`
    does.

    Args:
        queries: ``[Q, Lq, E]`` float16, bfloat16 or float32: projected already, and normalised
            where that is wanted.
        hidden: ``[N, Ld, H]``, or packed ``[T, H]`` with ``document_cu_seqlens``; the same dtype
            (or any under autocast).
        projection: ``[E, H]``, the same dtype (or any under autocast).
        query_mask: bool ``[Q, Lq]`` or None.
        document_mask: bool ``[N, Ld]`` or ``[T]``, holes allowed, or None.
        bias: ``[E]``, of the dtype of the others (or any under autocast), or None.
        document_cu_seqlens: int32 or int64 ``[N + 1]``, from 0 to T.
        normalize: L2-normalise the projected tokens.

    Returns:
        fp32 ``[Q, N]``. Differentiable once, with respect to queries, hidden, projection and bias,
        with gradients in the dtype of each and the same bits every time.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    queries, hidden, projection = cast_for_autocast(queries, hidden, projection)
    if bias is not None:
        (bias,) = cast_for_autocast(bias)
    operands = hidden_operands(
        queries, hidden, projection, bias, query_mask, document_mask, document_cu_seqlens, normalize
    )
    differentiate = torch.is_grad_enabled() and (
        queries.requires_grad
        or hidden.requires_grad
        or projection.requires_grad
        or (bias is not None and bias.requires_grad)
    )
    if needs_operators():
        return _score_op(*operands, differentiate)[0]
    if differentiate:
        return MaxSimFromHiddenFunction.apply(*operands[:4], operands)
    return _score(operands, False)[0]
