"""SPLADE heads: hidden states to sparse representations, one signature, one result.

N sequences, S tokens of the longest, T packed tokens, D hidden, V vocabulary.

``head(hidden [T, D], weight [V, D], bias [V] or None, tokens, memory) -> reps fp32 [N, V]`` with
``reps = log1p(relu(max over the sequence of hidden . weight^T + bias))``, or a sum in place of the
maximum, or a second log1p; see :class:`SpladeHead`. Heads have no parameters: weight and bias
belong to the backbone's decoder. The fused kernel keeps in a ``memory`` what it finds, for a
second pass over the same texts; others compute it again. Under torch.autocast the products run in
its dtype. All heads but the last work on the padded view, as SPLADE is trained today; they are the
baselines of :class:`SpartonHead`.
"""

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor, nn

from sparton.kernels.hybrid_head import hybrid_head
from sparton.kernels.hybrid_head.logits import vocabulary_tile
from sparton.kernels.splade_head import HeadMemory, TopK, splade_head, splade_head_topk
from sparton.kernels.splade_head.variants import Activation, Pooling, activate, check_variant
from sparton.types import Markup, Prompts, TokenBatch


class OtherSettings(Prompts, total=False):
    """The settings of a :class:`SpladeHead` that are the same for every one."""

    chunk_size: int | None


class SpladeHead(nn.Module):
    """What a head computes, by the names of sentence-transformers' SpladePooling.

    Args:
        pooling: over the tokens of a sequence, "max" or "sum" of the activated logits.
        activation: "relu" for ``log1p(relu(x))``, "log1p_relu" for ``log1p(log1p(relu(x)))``.
        chunk_size: how many tokens of a text SpladePooling takes at a time. Accepted with its
            other settings, and without effect: the result is the same with any, and heads that
            save memory do so in other ways.
        prompts: what is put before texts, see :class:`~sparton.types.Markup`.

    Raises:
        ValueError: another name.
    """

    fp8 = False

    def __init__(
        self,
        pooling: Pooling = "max",
        activation: Activation = "relu",
        *,
        chunk_size: int | None = None,
        **prompts: Unpack[Prompts],
    ) -> None:
        super().__init__()
        check_variant(pooling, activation)
        self.pooling: Pooling = pooling
        self.activation: Activation = activation
        self.markup = Markup(**prompts)

    def topk(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: TokenBatch, k: int
    ) -> TopK:
        """The k largest entries of each representation, without a gradient; by the fused kernel
        whichever the head."""
        return splade_head_topk(
            hidden,
            weight,
            bias,
            tokens.cu_seqlens,
            k,
            pooling=self.pooling,
            activation=self.activation,
            fp8=self.fp8,
        )


def _padded_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    pooling: Pooling,
    activation: Activation,
) -> Tensor:
    """Algorithm 1 of the Sparton paper: the full logits, then one operation after the other.

    Args:
        hidden: ``[N, S, D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        mask: bool ``[N, S]``, True at real tokens.
        pooling, activation: see :class:`SpladeHead`.

    Returns:
        fp32 ``[N, V]``.
    """
    logits = hidden @ weight.mT
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    values = activate(logits * mask[..., None], activation)
    if pooling == "sum":
        return values.sum(dim=1, dtype=torch.float32)
    return values.max(dim=1).values.float()


class EagerHead(SpladeHead):
    """Materialises the logits ``[N, S, V]`` and every step after them: the common practice."""

    _head = staticmethod(_padded_head)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: TokenBatch,
        memory: HeadMemory | None = None,
    ) -> Tensor:
        padded, mask = tokens.pad(hidden), tokens.padding_mask()
        return self._head(padded, weight, bias, mask, self.pooling, self.activation)


class CompiledHead(EagerHead):
    """The eager head through torch.compile, which fuses all that follows the matrix product.

    Compiled, with dynamic shapes, are the operations on padded tensors (products, bias, mask,
    relu, log1p, pooling); padding itself is not. Compilation happens at the first call.
    """

    def __init__(
        self,
        pooling: Pooling = "max",
        activation: Activation = "relu",
        **others: Unpack[OtherSettings],
    ) -> None:
        super().__init__(pooling, activation, **others)
        self._head = torch.compile(_padded_head, dynamic=True)


class TiledHead(SpladeHead):
    """The eager (or compiled) head on one tile of the vocabulary after the other.

    Bounds the memory of the forward without a graph; with one, autograd keeps every tile.

    Args:
        tile: vocabulary rows per tile. By default as many as give 64 MiB of 16-bit logits, in
            multiples of 256 and at least 512: the choice of the paper.
        compiled: put each tile through torch.compile.
        pooling, activation, others: see :class:`SpladeHead`.
    """

    def __init__(
        self,
        tile: int | None = None,
        compiled: bool = False,
        *,
        pooling: Pooling = "max",
        activation: Activation = "relu",
        **others: Unpack[OtherSettings],
    ) -> None:
        super().__init__(pooling, activation, **others)
        if tile is not None and tile < 1:
            raise ValueError(f"tile must be a positive number of vocabulary rows, got {tile}")
        self.tile = tile
        self._head: Callable[..., Tensor] = (
            torch.compile(_padded_head, dynamic=True) if compiled else _padded_head
        )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: TokenBatch,
        memory: HeadMemory | None = None,
    ) -> Tensor:
        padded, mask = tokens.pad(hidden), tokens.padding_mask()
        tile = self.tile or vocabulary_tile(mask.numel())
        weights = weight.split(tile)
        biases = [None] * len(weights) if bias is None else bias.split(tile)
        variant = (self.pooling, self.activation)
        tiles = zip(weights, biases, strict=True)
        return torch.cat([self._head(padded, *rows, mask, *variant) for rows in tiles], dim=1)


class HybridHead(SpladeHead):
    """The design that the Sparton paper measured (its Algorithms 2 and 3), for its maximum of
    ``log1p(relu(x))`` alone.

    cuBLAS products of vocabulary tiles through torch.compile, a kernel for the masked maximum of
    each tile, and a backward that adds with atomics: on a GPU its gradients differ in their last
    bits from call to call.

    Args:
        pooling, activation: "max" and "relu", the only ones of the paper's kernels.
        others: see :class:`SpladeHead`.

    Raises:
        ValueError: others.
    """

    def __init__(
        self,
        pooling: Pooling = "max",
        activation: Activation = "relu",
        **others: Unpack[OtherSettings],
    ) -> None:
        super().__init__(pooling, activation, **others)
        if (pooling, activation) != ("max", "relu"):
            raise ValueError(
                f"HybridHead has the paper's kernels, which know max pooling and relu alone, got "
                f"pooling={pooling!r} and activation={activation!r}: take another head, such as "
                "SpartonHead"
            )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: TokenBatch,
        memory: HeadMemory | None = None,
    ) -> Tensor:
        return hybrid_head(tokens.pad(hidden), weight, bias, tokens.padding_mask())


class SpartonHead(SpladeHead):
    """The fused kernel on packed tokens: no logits in memory, no work for padding.

    Args:
        pooling, activation, others: see :class:`SpladeHead`.
        fp8: look for the maxima in FP8, see :func:`~sparton.kernels.splade_head.splade_head`.
    """

    def __init__(
        self,
        pooling: Pooling = "max",
        activation: Activation = "relu",
        *,
        fp8: bool = False,
        **others: Unpack[OtherSettings],
    ) -> None:
        super().__init__(pooling, activation, **others)
        check_variant(pooling, activation, fp8)
        self.fp8 = fp8

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: TokenBatch,
        memory: HeadMemory | None = None,
    ) -> Tensor:
        return splade_head(
            hidden,
            weight,
            bias,
            tokens.cu_seqlens,
            pooling=self.pooling,
            activation=self.activation,
            fp8=self.fp8,
            memory=memory,
        )
