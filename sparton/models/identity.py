"""What tells whether two models are the same."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparton.models.body import EncoderBody
from sparton.models.encoder import Encoder

_SIMPLE = (str, int, float, bool, type(None))
# Of how it runs, where it comes from, and what stands in its weights.
_ELSEWHERE = ("training", "origin", "special_terms", "folding")


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """A digest of the names and values of weights."""
    sha = hashlib.sha256()
    for name, value in weights.items():
        sha.update(name.encode())
        content: Any = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        sha.update(content)
    return sha.hexdigest()[:32]


def settings_of(encoder: Encoder) -> Iterator[tuple[str, object]]:
    """Name and value of what an encoder and its parts were set to, but for those of its body."""
    bodies = [name for name, part in encoder.named_modules() if isinstance(part, EncoderBody)]
    for name, part in encoder.named_modules():
        ours = type(part).__module__.startswith("sparton.")
        if not ours or any(f"{name}.".startswith(f"{body}.") for body in bodies):
            continue
        for setting, value in sorted(vars(part).items()):
            values = value if isinstance(value, list | tuple) else [value]
            shown = not setting.startswith("_") and setting not in _ELSEWHERE
            if shown and all(isinstance(each, _SIMPLE) for each in values):
                yield f"{name}.{setting}", value
