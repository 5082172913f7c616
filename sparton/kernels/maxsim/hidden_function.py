"""MaxSim from hidden states as a PyTorch operator.

Q queries, N documents, L tokens, T packed tokens, H hidden, E embedding.

On a GPU one kernel projects, normalises and searches (hidden.py), and projected tokens stay on the
chip. A backward needs them again: where a gradient follows they are stored, E / H of the memory of
the hidden states, which autograd keeps in any case, and the products of many query tokens with them
are MaxSim's own. The backward reduces all gradients to T x E before they go back through the
projection: no gather of hidden states per query.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.dispatch import cast_for_autocast, late
from sparton.kernels.maxsim.hidden_operands import HiddenOperands, Kept, hidden_operands
from sparton.kernels.maxsim.operators import run_backward, run_forward
from sparton.kernels.maxsim.projection_cpu import project_tokens_backward_cpu, project_tokens_cpu
from sparton.kernels.operator import Operator


class Scored(NamedTuple):
    """What the forward returns: fp32 ``[Q, N]``, and what a backward needs, see :class:`Kept`."""

    scores: Tensor
    winners: Tensor | None
    tokens: Tensor | None
    norms: Tensor | None


_search_serves = late("sparton.kernels.maxsim.hidden.search_serves")
_search_hidden = late("sparton.kernels.maxsim.hidden.search_hidden")
_project_on_cuda = late("sparton.kernels.maxsim.projection.project_tokens")
_backward_on_cuda = late("sparton.kernels.maxsim.projection.project_tokens_backward")


def _score(operands: HiddenOperands, keep: bool) -> Scored:
    project = project_tokens_cpu
    if operands.hidden.is_cuda:
        if _search_serves()(operands.queries, keep):
            scores, kept = _search_hidden()(operands, argmax=keep)
            return Scored(scores, *(kept or (None, None, None)))
        project = _project_on_cuda()
    _, hidden, projection, bias, *_ = operands
    tokens, norms = project(hidden, projection, bias, normalize=operands.normalize)
    scores, winners = run_forward(operands.projected(tokens), False, "auto", keep)
    return Scored(scores, winners, tokens, norms)


def _fake(operands: HiddenOperands) -> Scored:
    hidden, (Q, L, E) = operands.hidden, operands.queries.shape
    N, rows = operands.cu_seqlens.shape[0] - 1, hidden.shape[:-1]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return Scored(
        hidden.new_empty((Q, N), dtype=torch.float32),
        hidden.new_empty((N, Q * L), dtype=torch.int32),
        hidden.new_empty((*rows, E)),
        hidden.new_empty(math.prod(rows) if operands.normalize else 0, dtype=wide),
    )


def _backward(
    grad: Tensor,
    kept: Kept,
    operands: HiddenOperands,
    need_queries: bool,
    need_hidden: bool,
    need_projection: bool,
    need_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of queries, hidden, projection and bias, None where not wanted."""
    hidden, projection = operands.hidden, operands.projection
    needs_behind = (need_hidden, need_projection, need_bias)
    through_projection = _backward_on_cuda() if hidden.is_cuda else project_tokens_backward_cpu
    dqueries, dtokens = run_backward(
        grad, kept.winners, operands.projected(kept.tokens),
        False, "auto", need_queries, any(needs_behind),
    )  # fmt: skip
    if dtokens is None:
        return dqueries, None, None, None
    behind = (hidden.contiguous(), projection.contiguous(), *needs_behind, operands.mask)
    return dqueries, *through_projection(dtokens, kept.tokens, kept.norms, *behind)


_operator = Operator("sparton::maxsim_from_hidden", _score, fake=_fake, keeps="keep")
# Masked tokens are no winners: a backward needs no masks but where it multiplies all.
_operator.differentiable(
    ("queries", "hidden", "projection", "bias"),
    _backward,
    results=Scored._fields,
    forgets=("query_mask",),
)


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
    return _operator(operands)
