"""The same in PyTorch, one operator after the other, in the precision of the operands."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.encoder_layer.dropout import hashed_dropout


def bias_gelu_reference(x: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x + bias)`` with the exact normal distribution."""
    return F.gelu(x + bias)


def post_norm_reference(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    gain: Tensor,
    shift: Tensor,
    *,
    eps: float,
    p: float = 0.0,
    seed: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``LayerNorm(residual + dropout(x + bias))``; see :func:`post_norm`."""
    dropped = hashed_dropout(x + bias, p, seed) if p else x + bias
    result = F.layer_norm(residual + dropped, x.shape[-1:], gain, shift, eps)
    return result if dtype is None else result.to(dtype)


def pre_norm_reference(
    x: Tensor,
    residual: Tensor,
    gain: Tensor,
    *,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual + x`` and its LayerNorm without a shift; see :func:`pre_norm`."""
    total = residual + x
    result = F.layer_norm(total, x.shape[-1:], gain, None, eps)
    return total, result if dtype is None else result.to(dtype)


def gated_gelu_reference(x: Tensor) -> Tensor:
    """``gelu(u) * gate`` of the halves u and gate of the columns."""
    u, gate = x.chunk(2, dim=-1)
    return F.gelu(u) * gate


def rotary_reference(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys in ``states [T, 3, H, d]`` turned by angles ``[T, d]``; see :func:`rotary`.
    In fp32 at least."""
    u, v = states[:, :2].chunk(2, dim=-1)
    dtype = torch.promote_types(cos.dtype, torch.float32)
    cos, sin = (x[:, None, None, :].to(dtype) for x in (cos, sin))
    turned = states[:, :2] * cos + torch.cat((-v, u), dim=-1) * sin
    return torch.cat((turned.to(states.dtype), states[:, 2:]), dim=1)
