"""Hidden states projected to embeddings, and their gradients' way back, in PyTorch.

T tokens, H hidden, E embedding.
"""

import torch
from torch import Tensor

from sparton.kernels.maxsim.normalization_cpu import EPSILON


@torch.autocast("cpu", enabled=False)
def project_tokens_cpu(
    hidden: Tensor, projection: Tensor, *, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Arguments and results of :func:`~sparton.kernels.maxsim.projection.project_tokens`; norms of
    float64 stay float64."""
    tokens, wide = hidden @ projection.T, torch.promote_types(hidden.dtype, torch.float32)
    if not normalize:
        return tokens, tokens.new_empty(0, dtype=wide)
    norms = tokens.to(wide).norm(dim=-1, keepdim=True)
    unit = tokens.to(wide) / norms.clamp_min(EPSILON)
    return unit.to(tokens.dtype), norms.flatten()


@torch.autocast("cpu", enabled=False)
def project_tokens_backward_cpu(
    grad: Tensor,
    tokens: Tensor,
    norms: Tensor,
    hidden: Tensor,
    projection: Tensor,
    *,
    normalize: bool,
    need_hidden: bool,
    need_projection: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Arguments and results of
    :func:`~sparton.kernels.maxsim.projection.project_tokens_backward`; ``grad`` is left alone."""
    grad = grad.flatten(0, -2)
    if normalize:
        g, unit = grad.to(norms.dtype), tokens.flatten(0, -2).to(norms.dtype)
        norms = norms[:, None]
        # Rounding moved the token off the unit sphere: nothing of a radial gradient may be left.
        radial = (g * unit).sum(1, keepdim=True) / unit.square().sum(1, keepdim=True)
        g = g - unit * torch.where(norms >= EPSILON, radial, 0)
        grad = (g / norms.clamp_min(EPSILON)).to(grad.dtype)
    dhidden = (grad @ projection).view_as(hidden) if need_hidden else None
    return dhidden, grad.T @ hidden.flatten(0, -2) if need_projection else None
