"""Tokens of unit length, and the way back of their gradients, in PyTorch.

T tokens, E embedding.
"""

import torch
from torch import Tensor

EPSILON = 1e-12


def _wide(tokens: Tensor) -> Tensor:
    return tokens.to(torch.promote_types(tokens.dtype, torch.float32))


def unit_and_norms_cpu(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """``x / max(|x|, 1e-12)`` of each row, and ``|x|`` ``[T, 1]``; in fp32 or wider."""
    tokens = _wide(tokens)
    norms = tokens.norm(dim=-1, keepdim=True)
    return tokens / norms.clamp_min(EPSILON), norms


def normalize_tokens_cpu(tokens: Tensor) -> Tensor:
    """``x / max(|x|, 1e-12)`` of each row, computed and returned in fp32 or wider."""
    return unit_and_norms_cpu(tokens)[0]


def through_norm_cpu(grad: Tensor, unit: Tensor, norms: Tensor) -> Tensor:
    """Gradient ``[T, E]`` of tokens from that of the normalised ones, in fp32 or wider.

    ``(g - y <y, g>) / |x|`` with ``y = x / |x|``; below a length of 1e-12 ``g / 1e-12``; zero where
    ``g`` is zero, whatever ``x`` holds: masked tokens may be no numbers.

    Args:
        grad: ``[T, E]``.
        unit, norms: of :func:`unit_and_norms_cpu`; ``unit`` may be rounded.
    """
    grad, unit = _wide(grad), _wide(unit)
    # Rounding moved the token off the unit sphere: nothing of a radial gradient may be left over.
    radial = (grad * unit).sum(-1, keepdim=True) / unit.square().sum(-1, keepdim=True)
    radial = torch.where(norms >= EPSILON, radial, 0)
    through = (grad - unit * radial) / norms.clamp_min(EPSILON)
    return through.where((grad != 0).any(-1, keepdim=True), 0)


def normalize_tokens_backward_cpu(grad: Tensor, tokens: Tensor) -> Tensor:
    """:func:`through_norm_cpu` of tokens whose norms are not known."""
    return through_norm_cpu(grad, *unit_and_norms_cpu(tokens))
