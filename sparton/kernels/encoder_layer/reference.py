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
