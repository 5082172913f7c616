"""MaxSim from hidden states as a PyTorch operator.

Q queries, N documents, L tokens, R = Q * Lq query tokens, T packed tokens, H hidden, E embedding.

The forward keeps the winners alone. The backward projects the tokens again, T x E, reduces the
gradients to that shape, and ends in the Jacobian of the normalisation and two matrix products: no
gather of hidden states per query.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparton.kernels.dispatch import cast_for_autocast, needs_operators, without_autocast
from sparton.kernels.maxsim.boundaries import equal_cu_seqlens
from sparton.kernels.maxsim.hidden_cpu import route_hidden_cpu, search_hidden_cpu


def _search(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    query_mask: Tensor | None,
    mask: Tensor | None,
    num_queries: int,
    longest: int | None,
    normalize: bool,
    argmax: bool,
) -> tuple[Tensor, Tensor]:
    """Scores and winners; see :func:`~sparton.kernels.maxsim.hidden.search_hidden`."""
    search = search_hidden_cpu
    if hidden.is_cuda:
        from sparton.kernels.maxsim.hidden import search_hidden

        search = search_hidden
    return search(
        queries, hidden, projection, cu_seqlens, query_mask, mask, num_queries,
        normalize=normalize, argmax=argmax, longest=longest,
    )  # fmt: skip


def _differentiate(
    grad: Tensor,
    winners: Tensor,
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
    """Gradients of the operands; empty where not wanted."""
    route = route_hidden_cpu
    if hidden.is_cuda:
        from sparton.kernels.maxsim.hidden import route_hidden

        route = route_hidden
    # A backward may run under an autocast that the forward did not see.
    with without_autocast(hidden.device):
        gradients = route(
            grad, winners, queries, hidden, projection, cu_seqlens, longest, normalize=normalize,
            need_queries=need_queries, need_hidden=need_hidden, need_projection=need_projection,
        )  # fmt: skip
    # An operator's schema knows no optional results: an unwanted one is an empty tensor.
    dqueries, dhidden, dprojection = (hidden.new_empty(0) if x is None else x for x in gradients)
    return dqueries, dhidden, dprojection


_search_op = torch.library.custom_op("sparton::maxsim_from_hidden", _search, mutates_args=())
_backward_op = torch.library.custom_op(
    "sparton::maxsim_from_hidden_backward", _differentiate, mutates_args=()
)


@_search_op.register_fake
def _(
    queries: Tensor,
    hidden: Tensor,
    projection: Tensor,
    cu_seqlens: Tensor,
    query_mask: Tensor | None,
    mask: Tensor | None,
    num_queries: int,
    longest: int | None,
    normalize: bool,
    argmax: bool,
) -> tuple[Tensor, Tensor]:
    N = cu_seqlens.shape[0] - 1
    scores = hidden.new_empty((num_queries, N), dtype=torch.float32)
    shape = (N, queries.shape[0]) if argmax else (0,)
    return scores, hidden.new_empty(shape, dtype=torch.int32)


@_backward_op.register_fake
def _(
    grad: Tensor,
    winners: Tensor,
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
    gradients = [
        x.new_empty(x.shape if need else (0,))
        for x, need in (
            (queries, need_queries),
            (hidden, need_hidden),
            (projection, need_projection),
        )
    ]
    return gradients[0], gradients[1], gradients[2]


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    # The winners have no gradient: it need not be made of zeros.
    ctx.set_materialize_grads(False)
    queries, hidden, projection, cu_seqlens, _, _, _, ctx.longest, ctx.normalize, _ = inputs
    ctx.save_for_backward(output[1], queries, hidden, projection, cu_seqlens)


def _gradients(ctx: Any, grad: Tensor, differentiate: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    gradients = differentiate(grad, *ctx.saved_tensors, ctx.longest, ctx.normalize, *needs)
    wanted = (x if need else None for x, need in zip(gradients, needs, strict=True))
    return *wanted, *[None] * 7


_search_op.register_autograd(
    lambda ctx, grad, _: _gradients(ctx, grad, _backward_op), setup_context=_setup_context
)


class _Search(torch.autograd.Function):
    """The operator without the dispatcher; see ``needs_operators``. Takes queries and hidden states
    of any shape: autograd need not see that they are flattened. A ``setup_context`` would have
    torch bind the arguments by name at every call."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        inputs = (queries.flatten(0, -2), hidden.flatten(0, -2), *others)
        output = _search(*inputs)
        ctx.mark_non_differentiable(output[1])
        ctx.shapes = (queries.shape, hidden.shape)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        dqueries, dhidden, *others = _gradients(ctx, grad, _differentiate)
        queries_shape, hidden_shape = ctx.shapes
        return (
            None if dqueries is None else dqueries.view(queries_shape),
            None if dhidden is None else dhidden.view(hidden_shape),
            *others,
        )


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
            where that is wanted. On Hopper E is at most 2,048 in 16 bits and 1,024 in float32; a
            GPU with less shared memory may refuse more than 128.
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
        ValueError: shapes, dtypes or devices that do not fit together, or too large an E.
    """
    queries, hidden, projection = cast_for_autocast(queries, hidden, projection)
    cu_seqlens = _check(queries, hidden, projection, query_mask, document_mask, document_cu_seqlens)
    others = (
        projection,
        cu_seqlens,
        None if query_mask is None else query_mask.flatten(),
        None if document_mask is None else document_mask.flatten(),
        queries.shape[0],
        hidden.shape[1] if hidden.dim() == 3 else None,
        normalize,
    )
    operands = (queries, hidden, projection)
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    if graph and not needs_operators():
        return _Search.apply(queries, hidden, *others, graph)[0]
    search = _search_op if needs_operators() else _search
    return search(queries.flatten(0, -2), hidden.flatten(0, -2), *others, graph)[0]


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
        cu_seqlens = equal_cu_seqlens(hidden.shape[0], hidden.shape[1], hidden.device)
    elif cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or not cu_seqlens.numel():
        raise ValueError(
            f"document_cu_seqlens must be int32 [N + 1], got {cu_seqlens.dtype} "
            f"{tuple(cu_seqlens.shape)}"
        )
    tensors = (queries, hidden, projection, query_mask, document_mask, cu_seqlens)
    if len(devices := {x.device for x in tensors if x is not None}) > 1:
        raise ValueError(f"operands must be on one device, got {sorted(map(str, devices))}")
    return cu_seqlens
