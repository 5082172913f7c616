"""The operators of late interaction with compressed documents: autograd, torch.compile.

Q queries, N documents, T packed tokens, W packed query tokens, E embedding, P bytes of a
token's residual.

CUDA tensors run the Triton kernels, CPU tensors the PyTorch version of the same algorithm; Triton
is imported when the first CUDA tensor arrives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparton.kernels.dispatch import needs_operators
from sparton.kernels.maxsim.codec import CompressedTokens, ResidualCodec
from sparton.kernels.maxsim.normalization_cpu import normalize_tokens_backward_cpu
from sparton.kernels.maxsim.residual.cpu import (
    residual_backward_cpu,
    residual_forward_cpu,
    residual_inverse_norms_cpu,
)
from sparton.kernels.maxsim.residual.pairs import check_pairing, pair_scores


def _codec(centroids: Tensor, bucket_weights: Tensor) -> ResidualCodec:
    """For restoring only: no cut-offs."""
    return ResidualCodec(centroids, bucket_weights, bucket_weights)


def _inverse_norms(
    codes: Tensor, residuals: Tensor, centroids: Tensor, bucket_weights: Tensor
) -> Tensor:
    compute = residual_inverse_norms_cpu
    if codes.is_cuda:
        from sparton.kernels.maxsim.residual.backward import residual_inverse_norms

        compute = residual_inverse_norms
    return compute(CompressedTokens(codes, residuals), _codec(centroids, bucket_weights))


def _forward(
    queries: Tensor,
    codes: Tensor,
    residuals: Tensor,
    inverse_norms: Tensor | None,
    centroids: Tensor,
    bucket_weights: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    normalize: bool,
    dtype: torch.dtype,
    argmax: bool,
) -> tuple[Tensor, Tensor]:
    forward = residual_forward_cpu
    if queries.is_cuda:
        from sparton.kernels.maxsim.residual.forward import residual_forward

        forward = residual_forward
    return forward(
        queries, CompressedTokens(codes, residuals, inverse_norms),
        _codec(centroids, bucket_weights), query_cu_seqlens, document_cu_seqlens, query_mask,
        document_mask, normalize=normalize, dtype=dtype, argmax=argmax,
    )  # fmt: skip


def _backward(
    grad: Tensor,
    argmax: Tensor,
    queries: Tensor,
    codes: Tensor,
    residuals: Tensor,
    inverse_norms: Tensor | None,
    centroids: Tensor,
    bucket_weights: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    normalize: bool,
) -> Tensor:
    backward = residual_backward_cpu
    through: Any = normalize_tokens_backward_cpu
    if grad.is_cuda:
        from sparton.kernels.maxsim.normalization import normalize_tokens_backward
        from sparton.kernels.maxsim.residual.backward import residual_backward

        backward, through = residual_backward, normalize_tokens_backward
    dqueries = backward(
        grad, argmax, CompressedTokens(codes, residuals, inverse_norms),
        _codec(centroids, bucket_weights), query_cu_seqlens, document_cu_seqlens, query_mask,
        dtype=torch.promote_types(queries.dtype, torch.float32) if normalize else queries.dtype,
    )  # fmt: skip
    return through(dqueries, queries).to(queries.dtype) if normalize else dqueries


_inverse_norms_op = torch.library.custom_op(
    "sparton::maxsim_residual_inverse_norms", _inverse_norms, mutates_args=()
)
_forward_op = torch.library.custom_op("sparton::maxsim_residual", _forward, mutates_args=())
_backward_op = torch.library.custom_op(
    "sparton::maxsim_residual_backward", _backward, mutates_args=()
)


@_inverse_norms_op.register_fake
def _(codes: Tensor, residuals: Tensor, centroids: Tensor, bucket_weights: Tensor) -> Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)


@_forward_op.register_fake
def _(queries: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, query_cu_seqlens, document_cu_seqlens, _, _, _, _, argmax = others
    Q, N = query_cu_seqlens.shape[0] - 1, document_cu_seqlens.shape[0] - 1
    shape = (N, queries.shape[0]) if argmax else (0,)
    return (
        queries.new_empty(Q, N, dtype=torch.float32),
        queries.new_empty(shape, dtype=torch.int32),
    )


@_backward_op.register_fake
def _(grad: Tensor, argmax: Tensor, queries: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(queries)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    # The winners have no gradient: it need not be made of zeros.
    ctx.set_materialize_grads(False)
    *tensors, _, ctx.normalize, _, _ = inputs
    ctx.save_for_backward(output[1], *tensors)


_forward_op.register_autograd(
    lambda ctx, grad, _: (_backward_op(grad, *ctx.saved_tensors, ctx.normalize), *[None] * 12),
    setup_context=_setup_context,
)


class _Forward(torch.autograd.Function):
    """The operator without the dispatcher; see ``needs_operators``. A ``setup_context`` would have
    torch bind the arguments by name at every call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _forward(*inputs)
        ctx.mark_non_differentiable(output[1])
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        arguments = (grad, *ctx.saved_tensors, ctx.normalize)
        return _backward(*arguments), *[None] * 12


def residual_scores(
    queries: Tensor,
    documents: CompressedTokens,
    codec: ResidualCodec,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    *,
    normalize: bool,
    pairing: str | Tensor = "cross",
) -> Tensor:
    """Packed and checked operands to scores."""
    device, dtype = queries.device.type, queries.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    registered = needs_operators()
    restoring = (codec.centroids.contiguous(), codec.bucket_weights.contiguous())
    codes, residuals = documents.codes.contiguous(), documents.residuals.contiguous()
    inverse_norms = documents.inverse_norms if normalize else None
    if normalize and inverse_norms is None:
        compute = _inverse_norms_op if registered else _inverse_norms
        inverse_norms = compute(codes, residuals, *restoring)
    if isinstance(pairing, Tensor) or pairing != "cross":
        bounds = query_cu_seqlens, document_cu_seqlens
        return pair_scores(
            queries, (codes, residuals, inverse_norms), *restoring, *bounds,
            check_pairing(pairing, *bounds), query_mask, document_mask,
            normalize=normalize, dtype=dtype,
        )  # fmt: skip
    graph = torch.is_grad_enabled() and queries.requires_grad
    forward: Callable[..., tuple[Tensor, Tensor]] = _forward
    if registered:
        forward = _forward_op
    elif graph:
        forward = _Forward.apply
    return forward(
        queries.contiguous(), codes, residuals,
        None if inverse_norms is None else inverse_norms.contiguous(), *restoring,
        query_cu_seqlens.contiguous(), document_cu_seqlens.contiguous(),
        None if query_mask is None else query_mask.contiguous(),
        None if document_mask is None else document_mask.contiguous(), normalize, dtype, graph,
    )[0]  # fmt: skip
