"""SPLADE heads: hidden states to sparse representations, one signature, one result.

N sequences, S tokens of the longest, T packed tokens, D hidden, V vocabulary.

``head(hidden [T, D], weight [V, D], bias [V] or None, tokens) -> reps fp32 [N, V]`` with
``reps = log1p(relu(max over the sequence of hidden . weight^T + bias))``. Heads have no parameters:
weight and bias belong to the backbone's decoder. Under torch.autocast the products run in its
dtype. All heads but the last work on the padded view, as SPLADE is trained today; they are the
baselines of :class:`SpartonHead`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparton.kernels.hybrid_head import hybrid_head
from sparton.kernels.splade_head import splade_head
from sparton.types import TokenBatch


def _padded_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor) -> Tensor:
    """Algorithm 1 of the Sparton paper: the full logits, then one operation after the other.

    Args:
        hidden: ``[N, S, D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        mask: bool ``[N, S]``, True at real tokens.

    Returns:
        fp32 ``[N, V]``.
    """
    logits = hidden @ weight.mT
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return torch.log1p(torch.relu(logits * mask[..., None])).max(dim=1).values.float()


class EagerHead(nn.Module):
    """Materialises the logits ``[N, S, V]`` and every step after them: the common practice."""

    def forward(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: TokenBatch
    ) -> Tensor:
        return _padded_head(tokens.pad(hidden), weight, bias, tokens.padding_mask())


class CompiledHead(nn.Module):
    """The eager head through torch.compile, which fuses all that follows the matrix product.

    Compiled, with dynamic shapes, are the operations on padded tensors (products, bias, mask,
    relu, log1p, maximum); padding itself is not. Compilation happens at the first call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._head = torch.compile(_padded_head, dynamic=True)

    def forward(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: TokenBatch
    ) -> Tensor:
        return self._head(tokens.pad(hidden), weight, bias, tokens.padding_mask())


class TiledHead(nn.Module):
    """The eager (or compiled) head on one tile of the vocabulary after the other.

    Bounds the memory of the forward without a graph; with one, autograd keeps every tile.

    Args:
        tile: vocabulary rows per tile. By default as many as give 64 MiB of 16-bit logits, in
            multiples of 256 and at least 512: the choice of the paper.
        compiled: put each tile through torch.compile.
    """

    def __init__(self, tile: int | None = None, compiled: bool = False) -> None:
        super().__init__()
        if tile is not None and tile < 1:
            raise ValueError(f"tile must be a positive number of vocabulary rows, got {tile}")
        self.tile = tile
        self._head: Callable[..., Tensor] = (
            torch.compile(_padded_head, dynamic=True) if compiled else _padded_head
        )

    def forward(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: TokenBatch
    ) -> Tensor:
        padded, mask = tokens.pad(hidden), tokens.padding_mask()
        tile = self.tile or max(2**26 // (2 * max(mask.numel(), 1)) // 256 * 256, 512)
        weights = weight.split(tile)
        biases = [None] * len(weights) if bias is None else bias.split(tile)
        return torch.cat(
            [self._head(padded, *rows, mask) for rows in zip(weights, biases, strict=True)], dim=1
        )


class HybridHead(nn.Module):
    """The design that the Sparton paper measured (its Algorithms 2 and 3).

    cuBLAS products of vocabulary tiles through torch.compile, a kernel for the masked maximum of
    each tile, and a backward that adds with atomics: on a GPU its gradients differ in their last
    bits from call to call.
    """

    def forward(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: TokenBatch
    ) -> Tensor:
        return hybrid_head(tokens.pad(hidden), weight, bias, tokens.padding_mask())


class SpartonHead(nn.Module):
    """The fused kernel on packed tokens: no logits in memory, no work for padding.

    Args:
        fp8: look for the maxima in FP8, see :func:`~sparton.kernels.splade_head.splade_head`.
    """

    def __init__(self, *, fp8: bool = False) -> None:
        super().__init__()
        self.fp8 = fp8

    def forward(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: TokenBatch
    ) -> Tensor:
        return splade_head(hidden, weight, bias, tokens.cu_seqlens, fp8=self.fp8)
