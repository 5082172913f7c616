"""The heads that are measured. Another one is another line."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor

from benchmarks.head.judge import SLACK
from sparton.models import heads


class PortableHead(heads.SpartonHead):
    """The portable kernel, which other GPUs have, where Hopper's own would serve."""

    def forward(self, *operands: Any, **options: Any) -> Tensor:
        # Kernels need Triton, which this module does without.
        from sparton.kernels.segment_max import forward

        portable = partial(forward.default_config, portable=True)
        with patch.object(forward, "default_config", portable):
            return super().forward(*operands, **options)


class Head(NamedTuple):
    """How a head is built, and how much of eager bfloat16's errors the gate allows it.

    Attributes:
        slack: factor of the errors of dhidden and dweight, relative to their norms.
        worst_slack: factor of the largest difference of a representation.
        rounding: factor of all other errors.
    """

    build: Callable[[], heads.SpladeHead]
    slack: float = SLACK
    worst_slack: float = SLACK
    rounding: float = SLACK


HEADS = {
    "eager": Head(heads.EagerHead),
    "compiled": Head(heads.CompiledHead),
    # Gradients of hidden states are added up in 16 bit, tile after tile.
    "tiled": Head(heads.TiledHead, rounding=2),
    "tiled_compiled": Head(lambda: heads.TiledHead(compiled=True), rounding=2),
    # Products are rounded to 16 bit before the bias: where that takes nearly all of them away, what
    # is left has fewer digits.
    "sparton_hybrid": Head(heads.HybridHead, slack=2, rounding=2),
    "sparton": Head(heads.SpartonHead),
    "sparton_portable": Head(PortableHead),
    # Between tokens whose logits nearly tie, FP8 takes the lesser one more often than bfloat16.
    "sparton_fp8": Head(lambda: heads.SpartonHead(fp8=True), slack=5, worst_slack=25),
}
