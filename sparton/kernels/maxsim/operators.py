"""MaxSim as a PyTorch operator.

Q queries, N documents, K documents per query, T packed tokens, E embedding.

Which forward ran makes no difference to the backward: all of them save the same winners.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sparton.kernels.dispatch import cast_for_autocast, late
from sparton.kernels.maxsim.cpu import maxsim_backward_cpu, maxsim_forward_cpu
from sparton.kernels.maxsim.operands import MaxSimOperands, check_backward
from sparton.kernels.operator import Operator, gradient_follows

_forward_on_cuda = late("sparton.kernels.maxsim.paths.maxsim_forward_cuda")
_backward_on_cuda = late("sparton.kernels.maxsim.paths.maxsim_backward_cuda")


def run_forward(
    operands: MaxSimOperands, normalize: bool, backward: str, argmax: bool
) -> tuple[Tensor, Tensor | None]:
    """On any device: scores and, if wanted, winners; otherwise None or an empty tensor."""
    forward = _forward_on_cuda() if operands.queries.is_cuda else maxsim_forward_cpu
    return forward(operands, normalize=normalize, argmax=argmax)


def run_backward(
    grad: Tensor,
    argmax: Tensor,
    operands: MaxSimOperands,
    normalize: bool,
    backward: str,
    need_queries: bool,
    need_documents: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """On any device: gradients of queries and documents, None where not wanted."""
    needs = {"need_queries": need_queries, "need_documents": need_documents}
    if operands.queries.is_cuda:
        dqueries, ddocuments = _backward_on_cuda()(
            grad, argmax, operands, normalize=normalize, backward=backward, **needs
        )
    else:
        dqueries, ddocuments = maxsim_backward_cpu(
            grad, argmax, operands, normalize=normalize, **needs
        )
    return (
        None if dqueries is None else dqueries.view(operands.queries.shape),
        None if ddocuments is None else ddocuments.view(operands.documents.shape),
    )


def _fake(operands: MaxSimOperands, normalize: bool, backward: str) -> tuple[Tensor, Tensor]:
    scores = operands.queries.new_empty(operands.scores_shape, dtype=torch.float32)
    # Only where a gradient follows is the longest query of pairs known.
    known = operands.pairs is None or operands.longest_query is not None
    winners = operands.argmax_shape if known else (0,)
    return scores, scores.new_empty(winners, dtype=torch.int32)


_operator = Operator("sparton::maxsim", run_forward, fake=_fake, keeps="argmax")
# Masked tokens are no winners: a backward needs no masks.
_operator.differentiable(
    ("queries", "documents"),
    run_backward,
    results=("scores", "argmax"),
    forgets=("query_mask", "document_mask"),
)


def maxsim_scores(
    make_operands: Callable[..., MaxSimOperands],
    queries: Tensor,
    documents: Tensor,
    arguments: tuple,
    normalize: bool,
    backward: str,
) -> Tensor:
    """Scores of what ``make_operands(queries, documents, *arguments)`` checks and describes."""
    check_backward(backward)
    queries, documents = cast_for_autocast(queries, documents)
    operands = make_operands(queries, documents, *arguments)
    if gradient_follows(queries, documents):
        operands = operands.with_room_for_winners()
    return _operator(operands, normalize, backward)
