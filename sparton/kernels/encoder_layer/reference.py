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
    residual: Tensor | None,
    gain: Tensor,
    *,
    eps: float,
    dtype: torch.dtype | None = None,
    centred: bool = True,
) -> tuple[Tensor, Tensor]:
    """``residual + x`` and its LayerNorm without a shift, or its RMSNorm; see :func:`pre_norm`."""
    total = x if residual is None else residual + x
    if centred:
        result = F.layer_norm(total, x.shape[-1:], gain, None, eps)
    else:
        result = F.rms_norm(total, x.shape[-1:], gain, eps)
    return total, result if dtype is None else result.to(dtype)


def gated_gelu_reference(x: Tensor) -> Tensor:
    """``gelu(u) * gate`` of the halves u and gate of the columns."""
    u, gate = x.chunk(2, dim=-1)
    return F.gelu(u) * gate


def gated_silu_reference(u: Tensor, v: Tensor) -> Tensor:
    """``silu(u) * v``."""
    return F.silu(u) * v


def rotary_reference(states: Tensor, cos: Tensor, sin: Tensor, *, copied: int = 0) -> Tensor:
    """Heads of ``states [T, H, d]`` turned by angles ``[T, d]``; see :func:`rotary`. In fp32 at
    least."""
    heads, others = states.split((states.shape[1] - copied, copied), dim=1)
    u, v = heads.chunk(2, dim=-1)
    dtype = torch.promote_types(cos.dtype, torch.float32)
    cos, sin = (x[:, None, :].to(dtype) for x in (cos, sin))
    turned = heads * cos + torch.cat((-v, u), dim=-1) * sin
    return torch.cat((turned.to(states.dtype), others), dim=1)


def normed_rotary_reference(
    states: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, *, eps: float
) -> Tensor:
    """The same behind RMSNorm of each head; see :func:`normed_rotary`. In fp32 at least."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    normed = F.rms_norm(wide, gain.shape, gain.to(wide.dtype), eps)
    return rotary_reference(normed, cos, sin).to(states.dtype)
