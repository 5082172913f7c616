"""The operators of late interaction with compressed documents.

P pairs, Q queries, N documents, T packed document tokens, W packed query tokens, E embedding.
"""

import torch
from torch import Tensor

from sparton.kernels.dispatch import autocast_dtype, late
from sparton.kernels.maxsim.normalization_cpu import normalize_tokens_backward_cpu
from sparton.kernels.maxsim.residual.cpu import (
    centroid_forward_cpu,
    pair_forward_cpu,
    residual_backward_cpu,
    residual_forward_cpu,
    residual_inverse_norms_cpu,
)
from sparton.kernels.maxsim.residual.operands import ResidualOperands, check_pairing
from sparton.kernels.operator import Operator

_backward_on_cuda = late("sparton.kernels.maxsim.residual.backward.residual_backward")
_through_norms_on_cuda = late("sparton.kernels.maxsim.normalization.normalize_tokens_backward")


def _fake(operands: ResidualOperands, normalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (Q, N), queries = operands.scores_shape, operands.queries
    scores = queries.new_empty(Q, N, dtype=torch.float32)
    return scores, queries.new_empty(N, queries.shape[0], dtype=torch.int32)


def _fake_pairs(
    operands: ResidualOperands, pairs: Tensor | None, normalize: bool, dtype: torch.dtype
) -> Tensor:
    count = operands.scores_shape[0] if pairs is None else pairs.shape[0]
    return operands.queries.new_empty(count, dtype=torch.float32)


def _backward(grad: Tensor, argmax: Tensor, operands: ResidualOperands, normalize: bool) -> Tensor:
    backward, through = residual_backward_cpu, normalize_tokens_backward_cpu
    if grad.is_cuda:
        backward, through = _backward_on_cuda(), _through_norms_on_cuda()
    queries, dtype = operands.queries, operands.queries.dtype
    if not normalize:
        return backward(grad, argmax, operands, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return through(backward(grad, argmax, operands, dtype=wide), queries).to(dtype)


_inverse_norms = Operator(
    "sparton::maxsim_residual_inverse_norms",
    residual_inverse_norms_cpu,
    fake=lambda codes, *_: codes.new_empty(codes.shape, dtype=torch.float32),
    cuda=late("sparton.kernels.maxsim.residual.backward.residual_inverse_norms"),
)
_scores = Operator(
    "sparton::maxsim_residual",
    residual_forward_cpu,
    fake=_fake,
    cuda=late("sparton.kernels.maxsim.residual.forward.residual_forward"),
    keeps="argmax",
)
_scores.differentiable(
    ("queries",), _backward, results=("scores", "argmax"), forgets=("document_mask",)
)
_pairs = Operator(
    "sparton::maxsim_residual_pairs",
    pair_forward_cpu,
    fake=_fake_pairs,
    cuda=late("sparton.kernels.maxsim.residual.pair_forward.pair_forward"),
)
_centroids = Operator(
    "sparton::maxsim_centroids",
    centroid_forward_cpu,
    fake=lambda operands, normalize: _fake(operands, normalize, torch.float32)[0],
    cuda=late("sparton.kernels.maxsim.residual.centroid_forward.centroid_forward"),
)


def residual_scores(
    operands: ResidualOperands, pairing: str | Tensor, *, normalize: bool
) -> Tensor:
    """Scores of checked and packed operands with residuals."""
    dtype = autocast_dtype(operands.queries) or operands.queries.dtype
    operands = operands.contiguous()
    if not normalize:
        operands = operands._replace(inverse_norms=None)
    elif operands.inverse_norms is None:
        restoring = operands.codes, operands.residuals, operands.centroids, operands.bucket_weights
        operands = operands._replace(inverse_norms=_inverse_norms(*restoring))
    if isinstance(pairing, str) and pairing == "cross":
        return _scores(operands, normalize, dtype)
    with torch.no_grad():
        return _pairs(operands, check_pairing(pairing, operands), normalize, dtype)


@torch.no_grad()
def centroid_scores(
    operands: ResidualOperands, pairing: str | Tensor, *, normalize: bool
) -> Tensor:
    """Scores of checked and packed operands without residuals."""
    operands = operands.contiguous()
    if isinstance(pairing, str) and pairing == "cross":
        return _centroids(operands, normalize)
    pairs = check_pairing(pairing, operands)
    return _pairs(operands, pairs, normalize, operands.queries.dtype)
