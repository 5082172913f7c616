"""MaxSim as PyTorch operators: autograd, torch.compile.

Q queries, N documents, K documents per query, T packed tokens, E embedding.

CUDA tensors run the Triton kernels, which are imported when the first CUDA tensor arrives, CPU
tensors PyTorch. Which forward ran makes no difference to the backward: all of them save the same
winners.

torch.compile, torch.export and dispatch modes see registered operators. Eager calls run the same
functions from an autograd function, or directly where no gradient can follow: the dispatcher of
operators written in Python would take more time than the kernels.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sparton.kernels.dispatch import cast_for_autocast, needs_operators
from sparton.kernels.maxsim.cpu import maxsim_backward_cpu, maxsim_forward_cpu
from sparton.kernels.maxsim.operands import MaxSimOperands, check_backward


@functools.cache
def _kernels() -> ModuleType:
    from sparton.kernels.maxsim import paths

    return paths


def run_forward(
    operands: MaxSimOperands, normalize: bool, argmax: bool
) -> tuple[Tensor, Tensor | None]:
    """On any device: scores and, if wanted, winners; otherwise None or an empty tensor."""
    forward = maxsim_forward_cpu
    if operands.queries.is_cuda:
        forward = _kernels().maxsim_forward_cuda
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
    """On any device: gradients of queries and documents, None where not wanted; as rows, or along
    the axes of the operands."""
    if operands.queries.is_cuda:
        return _kernels().maxsim_backward_cuda(
            grad, argmax, operands, normalize=normalize, backward=backward,
            need_queries=need_queries, need_documents=need_documents,
        )  # fmt: skip
    return maxsim_backward_cpu(
        grad, argmax, operands, normalize=normalize,
        need_queries=need_queries, need_documents=need_documents,
    )  # fmt: skip


@torch.library.custom_op("sparton::maxsim", mutates_args=())
def _forward_op(
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    per_query: int | None,
    query_length: int | None,
    longest_document: int | None,
    longest_query: int | None,
    verify: bool,
    pairs: Tensor | None,
    normalize: bool,
    backward: str,
    argmax: bool,
) -> tuple[Tensor, Tensor]:
    operands = MaxSimOperands(
        queries, documents, query_cu_seqlens, document_cu_seqlens, query_mask, document_mask,
        per_query, query_length, longest_document, longest_query, verify, pairs,
    )  # fmt: skip
    scores, winners = run_forward(operands, normalize, argmax)
    return scores, scores.new_empty(0, dtype=torch.int32) if winners is None else winners


@_forward_op.register_fake
def _(
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    *others, _, _, argmax = options
    operands = MaxSimOperands(
        queries, documents, query_cu_seqlens, document_cu_seqlens, query_mask, document_mask,
        *others,
    )  # fmt: skip
    scores = queries.new_empty(operands.scores_shape, dtype=torch.float32)
    return scores, queries.new_empty(operands.argmax_shape if argmax else (0,), dtype=torch.int32)


@torch.library.custom_op("sparton::maxsim_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    argmax: Tensor,
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    pairs: Tensor | None,
    per_query: int | None,
    query_length: int | None,
    longest_document: int | None,
    longest_query: int | None,
    normalize: bool,
    backward: str,
    need_queries: bool,
    need_documents: bool,
) -> tuple[Tensor, Tensor]:
    # Masked tokens are no winners: a backward needs no masks.
    operands = MaxSimOperands(
        queries, documents, query_cu_seqlens, document_cu_seqlens, None, None,
        per_query, query_length, longest_document, longest_query, pairs=pairs,
    )  # fmt: skip
    gradients = run_backward(
        grad, argmax, operands, normalize, backward, need_queries, need_documents
    )
    # An operator's schema knows no optional results: an unwanted one is an empty tensor.
    dqueries, ddocuments = (queries.new_empty(0) if x is None else x for x in gradients)
    return dqueries, ddocuments


@_backward_op.register_fake
def _(
    grad: Tensor, argmax: Tensor, queries: Tensor, documents: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    *_, need_queries, need_documents = options
    return (
        queries.new_empty(queries.shape if need_queries else (0,)),
        documents.new_empty(documents.shape if need_documents else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    # The winners have no gradient: it need not be made of zeros.
    ctx.set_materialize_grads(False)
    *sizes, _, pairs, normalize, backward, _ = inputs[6:]
    ctx.save_for_backward(output[1], *inputs[:4], pairs)
    ctx.options = (*sizes, normalize, backward)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:2]
    gradients = _backward_op(grad, *ctx.saved_tensors, *ctx.options, *needs)
    wanted = (x if need else None for x, need in zip(gradients, needs, strict=True))
    return *wanted, *[None] * 13


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def in_shape(gradient: Tensor, operand: Tensor) -> Tensor:
    return gradient if gradient.dim() == operand.dim() else gradient.view_as(operand)


class MaxSimFunction(torch.autograd.Function):
    """The operators for eager mode. ``call`` is operands, whether to normalise, and the backward:
    one argument, as autograd looks at each."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, documents: Tensor, call: tuple[MaxSimOperands, bool, str]
    ) -> Tensor:
        operands, normalize, backward = call
        scores, winners = run_forward(operands, normalize, True)
        ctx.save_for_backward(winners, queries, documents, *operands[2:4], operands.pairs)
        ctx.options = (operands[6:10], normalize, backward)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        argmax, queries, documents, *bounds, pairs = ctx.saved_tensors
        sizes, normalize, backward = ctx.options
        need_queries, need_documents, _ = ctx.needs_input_grad
        operands = MaxSimOperands(
            queries, documents, bounds[0], bounds[1], None, None, *sizes
        )._replace(pairs=pairs)
        # The operator refuses second derivatives where someone asks for them.
        if torch.is_grad_enabled() or needs_operators():
            dqueries, ddocuments = _backward_op(
                grad, argmax, *operands.flat()[:4], pairs, *sizes, normalize, backward,
                need_queries, need_documents,
            )  # fmt: skip
        else:
            dqueries, ddocuments = run_backward(
                grad, argmax, operands, normalize, backward, need_queries, need_documents
            )
        return (
            in_shape(dqueries, operands.queries) if need_queries else None,
            in_shape(ddocuments, operands.documents) if need_documents else None,
            None,
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
    differentiate = torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad)
    if differentiate:
        operands = operands.with_room_for_winners()
    if needs_operators():
        return _forward_op(*operands.flat(), normalize, backward, differentiate)[0]
    if differentiate:
        return MaxSimFunction.apply(queries, documents, (operands, normalize, backward))
    return run_forward(operands, normalize, False)[0]
