"""Sums that layers leave to the next norm: one kernel adds what the half before gave and normalises
the sum.

T packed tokens, D hidden width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparton.kernels.dispatch import autocast_dtype
from sparton.kernels.encoder_layer import pre_norm
from sparton.models.elementwise import has_kernels


class Unsummed(NamedTuple):
    """What a layer hands on, for the next norm to add.

    Attributes:
        residual: ``[1, T, D]``, the sum of all before.
        update: ``[1, T, D]``, what the layer's last product gave.
    """

    residual: Tensor
    update: Tensor


States = Tensor | Unsummed


def normed(states: States, norm: Any, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The sum, and what a norm makes of it.

    Args:
        norm: a LayerNorm without bias or an RMSNorm of transformers, or the identity.
        dtype: of the norm from a kernel; None: that of the next product.
    """
    residual, update = states if isinstance(states, Unsummed) else (None, states)
    if has_kernels(update) and not isinstance(norm, nn.Identity):
        centred = isinstance(norm, nn.LayerNorm)
        eps = norm.eps if centred else norm.variance_epsilon
        dtype = dtype or autocast_dtype(update)
        return pre_norm(update, residual, norm.weight, eps=eps, dtype=dtype, centred=centred)
    total = update if residual is None else residual + update
    return total, norm(total)
