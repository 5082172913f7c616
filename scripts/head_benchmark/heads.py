"""The heads that are measured. Another one is another line."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from sparton.models import heads


class Head(NamedTuple):
    """How a head is built, and how much of eager bfloat16's error the gate allows it."""

    build: Callable[[], nn.Module]
    slack: float = 1.1


HEADS = {
    "eager": Head(lambda: heads.EagerHead()),
    "compiled": Head(lambda: heads.CompiledHead()),
    "tiled": Head(lambda: heads.TiledHead()),
    "tiled_compiled": Head(lambda: heads.TiledHead(compiled=True)),
    "sparton_hybrid": Head(lambda: heads.HybridHead()),
    "sparton": Head(lambda: heads.SpartonHead()),
}
