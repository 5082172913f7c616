"""Hidden states projected to embeddings, and their gradients' way back, in PyTorch.

T tokens, H hidden, E embedding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.maxsim.normalization_cpu import through_norm_cpu, unit_and_norms_cpu
from sparton.kernels.maxsim.operands import taking_part


def project_tokens_cpu(
    hidden: Tensor, projection: Tensor, bias: Tensor | None, *, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Arguments and results of :func:`~sparton.kernels.maxsim.projection.project_tokens`; norms of
    float64 stay float64."""
    tokens = F.linear(hidden, projection, bias)
    if not normalize:
        wide = torch.promote_types(tokens.dtype, torch.float32)
        return tokens, tokens.new_empty(0, dtype=wide)
    unit, norms = unit_and_norms_cpu(tokens)
    return unit.to(tokens.dtype), norms.flatten()


def project_tokens_backward_cpu(
    grad: Tensor,
    tokens: Tensor,
    norms: Tensor,
    hidden: Tensor,
    projection: Tensor,
    need_hidden: bool,
    need_projection: bool,
    need_bias: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Arguments and results of
    :func:`~sparton.kernels.maxsim.projection.project_tokens_backward`; ``grad`` is left alone."""
    grad = grad.flatten(0, -2)
    if norms.numel():
        grad = through_norm_cpu(grad, tokens.flatten(0, -2), norms[:, None]).to(grad.dtype)
    dhidden = (grad @ projection).view_as(hidden) if need_hidden else None
    dprojection = None
    if need_projection:
        dprojection = grad.T @ taking_part(hidden.flatten(0, -2), mask)
    return dhidden, dprojection, grad.sum(0) if need_bias else None
