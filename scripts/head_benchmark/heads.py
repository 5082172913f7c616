"""The heads that are measured. Another one is another line."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from head_benchmark.gate import SLACK
from sparton.models import heads


class Head(NamedTuple):
    """How a head is built, and how much of eager bfloat16's errors the gate allows it.

    Attributes:
        slack: factor of the errors of dhidden and dweight, relative to their norms.
        worst_slack: factor of the largest difference of a representation.
    """

    build: Callable[[], nn.Module]
    slack: float = SLACK
    worst_slack: float = SLACK


HEADS = {
    "eager": Head(lambda: heads.EagerHead()),
    "compiled": Head(lambda: heads.CompiledHead()),
    "tiled": Head(lambda: heads.TiledHead()),
    "tiled_compiled": Head(lambda: heads.TiledHead(compiled=True)),
    "sparton_hybrid": Head(lambda: heads.HybridHead()),
    "sparton": Head(lambda: heads.SpartonHead()),
    # Between tokens whose logits nearly tie, FP8 takes the lesser one more often than bfloat16.
    "sparton_fp8": Head(lambda: heads.SpartonHead(fp8=True), slack=5, worst_slack=25),
}
