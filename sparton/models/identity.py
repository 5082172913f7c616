"""What tells whether two models are the same."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """A digest of the names and values of weights."""
    sha = hashlib.sha256()
    for name, value in weights.items():
        sha.update(name.encode())
        content: Any = value.cpu().contiguous().view(torch.uint8).numpy()
        sha.update(content)
    return sha.hexdigest()[:32]
