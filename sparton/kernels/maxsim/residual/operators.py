"""The operators of late interaction with compressed documents.

Q queries, N documents, T packed tokens, W packed query tokens, E embedding, P bytes of a
token's residual.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparton.kernels.maxsim.codec import CompressedTokens, ResidualCodec
from sparton.kernels.maxsim.normalization_cpu import normalize_tokens_backward_cpu
from sparton.kernels.maxsim.residual.cpu import (
    residual_backward_cpu,
    residual_forward_cpu,
    residual_inverse_norms_cpu,
)
from sparton.kernels.maxsim.residual.operands import contiguous
from sparton.kernels.maxsim.residual.pairs import check_pairing, pair_scores
from sparton.kernels.operator import Operator


def _inverse_norms_cuda() -> Callable[..., Tensor]:
    from sparton.kernels.maxsim.residual.backward import residual_inverse_norms

    return residual_inverse_norms


def _forward_cuda() -> Callable[..., tuple[Tensor, Tensor]]:
    from sparton.kernels.maxsim.residual.forward import residual_forward

    return residual_forward


def _fake(
    queries: Tensor,
    documents: CompressedTokens,
    codec: ResidualCodec,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    normalize: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    Q, N = query_cu_seqlens.shape[0] - 1, document_cu_seqlens.shape[0] - 1
    scores = queries.new_empty(Q, N, dtype=torch.float32)
    return scores, queries.new_empty(N, queries.shape[0], dtype=torch.int32)


def _backward(
    grad: Tensor,
    argmax: Tensor,
    queries: Tensor,
    documents: CompressedTokens,
    codec: ResidualCodec,
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
        grad, argmax, documents, codec, query_cu_seqlens, document_cu_seqlens, query_mask,
        dtype=torch.promote_types(queries.dtype, torch.float32) if normalize else queries.dtype,
    )  # fmt: skip
    return through(dqueries, queries).to(queries.dtype) if normalize else dqueries


_inverse_norms = Operator(
    "sparton::maxsim_residual_inverse_norms",
    residual_inverse_norms_cpu,
    fake=lambda documents, codec: documents.codes.new_empty(
        documents.codes.shape, dtype=torch.float32
    ),
    cuda=_inverse_norms_cuda,
)
_scores = Operator(
    "sparton::maxsim_residual",
    residual_forward_cpu,
    fake=_fake,
    cuda=_forward_cuda,
    keeps="argmax",
)
_scores.differentiable(("queries",), _backward, results=("scores", "argmax"))


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
    # Documents are restored without cut-offs, which may be elsewhere.
    weights = codec.bucket_weights.contiguous()
    codec = ResidualCodec(codec.centroids.contiguous(), weights, weights)
    inverse_norms = documents.inverse_norms if normalize else None
    codes, residuals = documents.codes.contiguous(), documents.residuals.contiguous()
    documents = CompressedTokens(codes, residuals, *contiguous(inverse_norms))
    if normalize and inverse_norms is None:
        documents = documents._replace(inverse_norms=_inverse_norms(documents, codec))
    bounds = query_cu_seqlens.contiguous(), document_cu_seqlens.contiguous()
    if isinstance(pairing, Tensor) or pairing != "cross":
        return pair_scores(
            queries, documents, *codec[::2], *bounds, check_pairing(pairing, *bounds), query_mask,
            document_mask, normalize=normalize, dtype=dtype,
        )  # fmt: skip
    masks = contiguous(query_mask, document_mask)
    return _scores(queries.contiguous(), documents, codec, *bounds, *masks, normalize, dtype)
