"""Hidden states of packed tokens to one embedding per text.

T packed tokens, N texts, D hidden width.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.types import TokenBatch

PoolingMode = Literal["mean", "cls", "last"]


def pooling_mode(name: str) -> PoolingMode:
    """A mode by its name.

    Raises:
        ValueError: there is none of that name.
    """
    for mode in get_args(PoolingMode):
        if name == mode:
            return mode
    raise ValueError(f"pooling={name!r} is not one of {', '.join(get_args(PoolingMode))}")


class Pooling(NamedTuple):
    """How a dense encoder makes an embedding of its hidden states.

    Attributes:
        mode: "mean" over a text's tokens, special ones included, "cls", its first token, or "last",
            its last one, which alone has seen all of a text where attention is causal.
        normalize: to length 1.
    """

    mode: PoolingMode = "mean"
    normalize: bool = False

    def __call__(self, hidden: Tensor, tokens: TokenBatch) -> Tensor:
        """``[T, D]`` to fp32 ``[N, D]`` of the tokens that are pooled, zeros for a text without
        any; the same from call to call on every device."""
        hidden, tokens = tokens.to_pool(hidden)
        pooled = _POOLS[self.mode](hidden, tokens.cu_seqlens).float()
        return F.normalize(pooled, dim=-1) if self.normalize else pooled


def _means(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    # One thread adds up a number of a text: no atomics, forward or backward.
    sums = torch.segment_reduce(hidden.float(), "sum", offsets=cu_seqlens, initial=0, unsafe=True)
    return sums / cu_seqlens.diff().clamp(min=1)[:, None]


def _firsts(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    return _rows(hidden, cu_seqlens[:-1], cu_seqlens)


def _lasts(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    return _rows(hidden, cu_seqlens[1:] - 1, cu_seqlens)


def _rows(hidden: Tensor, places: Tensor, cu_seqlens: Tensor) -> Tensor:
    """A row of each text; zeros for one without any."""
    if hidden.shape[0] == 0:
        return hidden.new_zeros(cu_seqlens.shape[0] - 1, hidden.shape[1])
    found = hidden[places.clamp(0, hidden.shape[0] - 1)]
    return found.where(cu_seqlens.diff()[:, None] > 0, 0)


_POOLS: dict[PoolingMode, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _means,
    "cls": _firsts,
    "last": _lasts,
}
