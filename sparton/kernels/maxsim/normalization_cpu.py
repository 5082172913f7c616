"""Tokens of unit length, and the way back of their gradients, in PyTorch.

T tokens, E embedding.
"""

import torch
from torch import Tensor

EPSILON = 1e-12


def _wide(tokens: Tensor) -> Tensor:
    return tokens.to(torch.promote_types(tokens.dtype, torch.float32))


def normalize_tokens_cpu(tokens: Tensor) -> Tensor:
    """``x / max(|x|, 1e-12)`` of each row, computed and returned in fp32 or wider."""
    tokens = _wide(tokens)
    return tokens / tokens.norm(dim=-1, keepdim=True).clamp_min(EPSILON)


def normalize_tokens_backward_cpu(grad: Tensor, tokens: Tensor) -> Tensor:
    """Gradient ``[T, E]`` of ``tokens`` from that of the normalised ones, in fp32 or wider.

    ``(g - y <y, g>) / |x|`` with ``y = x / |x|``; below a length of 1e-12 ``g / 1e-12``.
    """
    grad, tokens = _wide(grad), _wide(tokens)
    norm = tokens.norm(dim=-1, keepdim=True)
    unit = tokens / norm.clamp_min(EPSILON)
    radial = torch.where(norm >= EPSILON, (grad * unit).sum(-1, keepdim=True), 0)
    return (grad - unit * radial) / norm.clamp_min(EPSILON)
