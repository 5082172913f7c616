"""MaxSim as PyTorch operators: autograd, torch.compile, autocast.

Q queries, N documents, K documents per query, P pairs, L tokens, E embedding, T packed tokens.

One operator serves every pairing, padded batches and packed ones: the public functions check their
operands and flatten them (see operands.py). CPU tensors run PyTorch, CUDA tensors Triton kernels,
which are imported when the first CUDA tensor arrives. Which forward ran makes no difference to the
backward: all of them save the same winners.

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

from sparton.kernels.maxsim.cpu import maxsim_backward_cpu, maxsim_forward_cpu
from sparton.kernels.maxsim.operands import (
    Backward,
    MaxSimOperands,
    check_backward,
    packed_operands,
    padded_operands,
)
from sparton.kernels.segment_max.operands import cast_for_autocast, needs_operators


@functools.cache
def _kernels() -> ModuleType:
    from sparton.kernels.maxsim import paths

    return paths


def _forward(
    operands: MaxSimOperands, normalize: bool, argmax: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores and, if wanted, winners; otherwise None or an empty tensor."""
    forward = maxsim_forward_cpu
    if operands.queries.is_cuda:
        forward = _kernels().maxsim_forward_cuda
    return forward(operands, normalize=normalize, argmax=argmax)


def _gradients(
    grad: Tensor,
    argmax: Tensor,
    operands: MaxSimOperands,
    normalize: bool,
    backward: str,
    need_queries: bool,
    need_documents: bool,
) -> tuple[Tensor | None, Tensor | None]:
    options: dict[str, Any] = {
        "normalize": normalize,
        "need_queries": need_queries,
        "need_documents": need_documents,
    }
    if operands.queries.is_cuda:
        return _kernels().maxsim_backward_cuda(grad, argmax, operands, backward=backward, **options)
    return maxsim_backward_cpu(grad, argmax, operands, **options)


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
    document_length: int | None,
    normalize: bool,
    backward: str,
    argmax: bool,
) -> tuple[Tensor, Tensor]:
    operands = MaxSimOperands(
        queries, documents, query_cu_seqlens, document_cu_seqlens, query_mask, document_mask,
        per_query, query_length, document_length,
    )  # fmt: skip
    scores, winners = _forward(operands, normalize, argmax)
    return scores, scores.new_empty(0, dtype=torch.int32) if winners is None else winners


@_forward_op.register_fake
def _(
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    per_query: int | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    columns = document_cu_seqlens.shape[0] - 1 if per_query is None else per_query
    scores = queries.new_empty((query_cu_seqlens.shape[0] - 1, columns), dtype=torch.float32)
    shape = (columns, queries.shape[0]) if options[-1] else (0,)
    return scores, queries.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("sparton::maxsim_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    argmax: Tensor,
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    per_query: int | None,
    query_length: int | None,
    document_length: int | None,
    normalize: bool,
    backward: str,
    need_queries: bool,
    need_documents: bool,
) -> tuple[Tensor, Tensor]:
    operands = MaxSimOperands(
        queries, documents, query_cu_seqlens, document_cu_seqlens, query_mask, document_mask,
        per_query, query_length, document_length,
    )  # fmt: skip
    gradients = _gradients(
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
    ctx.save_for_backward(output[1], *inputs[:6])
    ctx.options = inputs[6:-1]


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:2]
    gradients = _backward_op(grad, *ctx.saved_tensors, *ctx.options, *needs)
    wanted = (x if need else None for x, need in zip(gradients, needs, strict=True))
    return *wanted, *[None] * 10


_forward_op.register_autograd(_backward, setup_context=_setup_context)


class MaxSimFunction(torch.autograd.Function):
    """The operators for eager mode; operands are made inside, so that autograd sees no views."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        documents: Tensor,
        make_operands: Callable[..., MaxSimOperands],
        arguments: tuple,
        normalize: bool,
        backward: str,
    ) -> Tensor:
        operands = make_operands(queries, documents, *arguments)
        scores, winners = _forward(operands, normalize, True)
        ctx.save_for_backward(winners, queries, documents, *operands[2:6])
        ctx.options = (*operands[6:], normalize, backward)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        argmax, queries, documents, *others = ctx.saved_tensors
        needs, E = ctx.needs_input_grad[:2], queries.shape[-1]
        tensors = (queries.reshape(-1, E), documents.reshape(-1, E), *others)
        gradients: tuple[Tensor | None, ...]
        # The operator refuses second derivatives where someone asks for them.
        if torch.is_grad_enabled() or needs_operators():
            gradients = _backward_op(grad, argmax, *tensors, *ctx.options, *needs)
        else:
            *sizes, normalize, backward = ctx.options
            operands = MaxSimOperands(*tensors, *sizes)
            gradients = _gradients(grad, argmax, operands, normalize, backward, *needs)
        dqueries, ddocuments = (
            x.view_as(given) if x is not None and need else None
            for x, given, need in zip(gradients, (queries, documents), needs, strict=True)
        )
        return dqueries, ddocuments, None, None, None, None


def _scores(
    make_operands: Callable[..., MaxSimOperands],
    queries: Tensor,
    documents: Tensor,
    arguments: tuple,
    normalize: bool,
    backward: str,
) -> Tensor:
    check_backward(backward)
    queries, documents = cast_for_autocast(queries, documents)
    differentiate = torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad)
    if needs_operators():
        operands = make_operands(queries, documents, *arguments)
        return _forward_op(*operands, normalize, backward, differentiate)[0]
    if differentiate:
        return MaxSimFunction.apply(
            queries, documents, make_operands, arguments, normalize, backward
        )
    return _forward(make_operands(queries, documents, *arguments), normalize, False)[0]


def maxsim(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    backward: Backward = "auto",
) -> Tensor:
    """MaxSim of padded queries against shared documents, or against documents of their own.

    ``score(q, d) = sum over the tokens s of q of max over the tokens t of d of <q_s, d_t>``, over
    tokens whose mask is True. Masks may have holes; a masked token never wins, whatever the sign of
    the similarities, and gets a gradient of zero. A query or a document without tokens scores 0.
    Equal similarities: the first token wins and gets the gradient. Products, maxima and sums run in
    fp32. Under torch.autocast both sides are cast to its dtype first. The winners are saved only
    where a gradient can follow. A token that is not a number makes the scores it enters NaN; on a
    GPU a cross product of many query tokens leaves its similarities out instead.

    Args:
        queries: ``[Q, Lq, E]`` float16, bfloat16 or float32 (float64 on the CPU).
        documents: ``[N, Ld, E]``, the same dtype (or any under autocast): every query against all.
            ``[Q, K, Ld, E]``: every query against K of its own, in one launch.
        query_mask: bool ``[Q, Lq]``; None if every token takes part.
        document_mask: bool ``[N, Ld]`` or ``[Q, K, Ld]``; None if every token takes part.
        normalize: L2-normalise every token (``x / max(|x|, 1e-12)``) first; the gradients are those
            of the given tokens.
        backward: "lowmem" sums each row of a gradient in one place, in a fixed order, without a
            buffer in fp32: the same bits every time. "unified" is one pass with atomic additions,
            on GPUs; not repeatable. "auto" is "lowmem". CPU tensors are repeatable in any case.

    Returns:
        fp32 ``[Q, N]`` or ``[Q, K]``. Differentiable once, with respect to queries and documents;
        gradients come in the dtype of each.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an unknown backward.
    """
    arguments = (query_mask, document_mask)
    return _scores(padded_operands, queries, documents, arguments, normalize, backward)


def maxsim_pairs(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    backward: Backward = "auto",
) -> Tensor:
    """MaxSim of query p and document p, padded.

    Args:
        queries: ``[P, Lq, E]``.
        documents: ``[P, Ld, E]``.
        query_mask: bool ``[P, Lq]`` or None.
        document_mask: bool ``[P, Ld]`` or None.
        normalize, backward: as in :func:`maxsim`, and so is everything else.

    Returns:
        fp32 ``[P]``.

    Raises:
        ValueError: as :func:`maxsim`, and for unequal numbers of queries and documents.
    """
    arguments = (query_mask, document_mask, True)
    scores = _scores(padded_operands, queries, documents, arguments, normalize, backward)
    return scores.squeeze(1)


def maxsim_varlen(
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    pairing: str | int = "cross",
    normalize: bool = False,
    backward: Backward = "auto",
) -> Tensor:
    """MaxSim of packed queries and documents; no work is done for padding.

    Args:
        queries: ``[Tq, E]``, Q queries end to end.
        documents: ``[Td, E]``, N documents end to end, the same dtype (or any under autocast).
        query_cu_seqlens: int32 ``[Q + 1]``, boundaries of the queries; from 0 to Tq, ascending.
        document_cu_seqlens: int32 ``[N + 1]``, from 0 to Td.
        query_mask: bool ``[Tq]`` or None, for tokens left out (punctuation, say).
        document_mask: bool ``[Td]`` or None.
        pairing: "cross" for every query against every document, "pairs" for query p and document p,
            or K for query q against documents ``q * K : (q + 1) * K``.
        normalize, backward: as in :func:`maxsim`, and so is everything else.

    Returns:
        fp32 ``[Q, N]``, ``[P]`` or ``[Q, K]``.

    Raises:
        ValueError: as :func:`maxsim`, for an unknown pairing, and for numbers of queries and
            documents that it does not allow.
    """
    bounds = (query_cu_seqlens, document_cu_seqlens)
    arguments = (*bounds, query_mask, document_mask, pairing)
    scores = _scores(packed_operands, queries, documents, arguments, normalize, backward)
    return scores.squeeze(1) if pairing == "pairs" else scores
