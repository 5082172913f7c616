"""What searches of the core have in common: its configurations, its regimes, the true gradients.

N sequences, T packed tokens, D hidden, V rows of the weight.
"""

from typing import Any

import torch
from torch import Tensor

from sparton.kernels.segment_max.backward_plan import DEFAULT_CONFIG, BackwardConfig
from sparton.kernels.segment_max.forward import forward_configs
from sparton.kernels.tuned import Regime, regime_of
from sparton.kernels.tuning import neighbours

# Tiles stay as they are.
FORWARD_CHANGES = {
    "segment": (32, 64, 128),
    "group_tokens": (1024, 2048, 4096, 16384),
    "band": (4, 8, 16, 32, 64),
    "num_stages": (2, 3, 4),
}
BACKWARD_CHANGES = {
    "chunk": (512, 2048, 4096),
    "share": (128, 256, 1024),
    "block_e": (4, 16),
    "block_t": (1, 2, 8),
    "programs": (2**13, 2**15),
    "sort_warps": (2, 8),
    "slice_bytes": (2 * 2**20, 4 * 2**20, 20 * 2**20, 40 * 2**20),
}


def forward_candidates(dtype: torch.dtype, device: str) -> list[Any]:
    """The configurations meant for operands of ``dtype`` on a device, and their neighbours."""
    capability = torch.cuda.get_device_capability(device)
    listed = forward_configs(dtype, capability)
    found = (near for config in listed for near in neighbours(config, FORWARD_CHANGES))
    return list(dict.fromkeys(found))


def backward_candidates() -> list[BackwardConfig]:
    """The default, and its neighbours."""
    return neighbours(DEFAULT_CONFIG, BACKWARD_CHANGES)


def regime(kernel: str, hidden: Tensor, weight: Tensor, mean_length: float) -> Regime:
    """What winners for operands ``[T, D]`` and ``[V, D]`` belong to."""
    rows, width = weight.shape
    return regime_of(kernel, hidden.device, hidden.dtype, width, rows, mean_length)


def gradients_of_winners(
    given: Tensor, argmax: Tensor, hidden: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden and weight in fp32, where entry n, v passes ``given[n, v]`` on to the
    product of token ``argmax[n, v]``, -1 for none, and row v."""
    hidden, weight = hidden.float(), weight.float()
    dhidden, dweight = torch.zeros_like(hidden), torch.zeros_like(weight)
    given = torch.where(argmax >= 0, given, 0.0)
    for upstream, winners in zip(given, argmax.clamp_min(0), strict=True):
        dweight += upstream[:, None] * hidden[winners]
        dhidden.index_add_(0, winners, upstream[:, None] * weight)
    return dhidden, dweight
