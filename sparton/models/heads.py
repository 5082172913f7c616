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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from sparton.arguments import ArgumentError, Instance
from sparton.kernels.hybrid_head import hybrid_head
from sparton.kernels.hybrid_head.logits import vocabulary_tile
from sparton.kernels.splade_head import HeadMemory, TopK, splade_head, splade_head_topk
from sparton.kernels.splade_head.token_topk import largest_of_rows
from sparton.kernels.splade_head.variants import (
    Activation,
    Pooling,
    check_token_topk,
    check_variant,
)
from sparton.models.folding import Folding, read_folding
from sparton.models.padded import largest, largest_of_tile, padded_head, pool_entries
from sparton.types import Markup, Prompts, TokenBatch

if TYPE_CHECKING:
    from sparton.models.backbone import Backbone

EXCLUDED = -1e4  # a bias that no logit makes up for; 16-bit numbers hold it


class OtherSettings(Prompts, total=False):
    """The settings of a :class:`SpladeHead` that are the same for every one."""

    token_topk: int | None
    special_terms: bool
    folding: str | Path | None
    chunk_size: int | None
    echo: str | None


class SpladeHead(nn.Module):
    """What a head computes, by the names of sentence-transformers' SpladePooling.

    Args:
        pooling: over the tokens of a sequence, "max" or "sum" of the activated logits.
        activation: "relu" for ``log1p(relu(x))``, "log1p_relu" for ``log1p(log1p(relu(x)))``.
        token_topk: of the terms of each token so many with the largest logits are pooled, among
            equal ones the first of the vocabulary; None for all.
        special_terms: False takes the tokenizer's special tokens, such as [CLS] and [SEP], out of
            the terms: the bias of the decoder is set to :data:`EXCLUDED` there, for good.
        folding: terms that count as one, see :func:`~sparton.models.folding.read_folding`; None
            for none. Each token's ``token_topk`` are chosen before.
        chunk_size: how many tokens of a text SpladePooling takes at a time. Accepted with its
            other settings, and without effect: the result is the same with any, and heads that
            save memory do so in other ways.
        echo: read texts twice, with this between, see :class:`~sparton.types.Markup`.
        prompts: what is put before texts, see there.

    Raises:
        ValueError: another name, or no such number of terms.
    """

    fp8 = False

    def __init__(
        self,
        pooling: Pooling = "max",
        activation: Activation = "relu",
        *,
        token_topk: int | None = None,
        special_terms: bool = True,
        folding: str | Path | None = None,
        chunk_size: int | None = None,
        echo: str | None = None,
        **prompts: Unpack[Prompts],
    ) -> None:
        super().__init__()
        check_variant(pooling, activation)
        check_token_topk(token_topk)
        self.pooling: Pooling = pooling
        self.activation: Activation = activation
        self.token_topk = token_topk
        self.special_terms = special_terms
        self.folding = folding
        self.fold: Folding | None = None
        self._folded_words = 0  # a hash of the vocabulary that it is of
        self.markup = Markup(**prompts, echo=echo)

    @property
    def own(self) -> str | None:
        """The class of a head of a user's own, which may compute what no settings say; None for
        those of this library, which compute the same in several ways."""
        kind = type(self)
        ours = kind.__module__.startswith("sparton.")
        return None if ours else f"{kind.__module__}.{kind.__qualname__}"

    def settle(self, backbone: "Backbone") -> None:
        """Take out special terms and read the folding; an encoder calls it with its backbone.

        Raises:
            FileNotFoundError, ValueError: the folding cannot be read, see
                :func:`~sparton.models.folding.read_folding`.
            ValueError: the head has that of another vocabulary.
        """
        if not self.special_terms:
            backbone.set_bias(backbone.tokenizer.all_special_ids, EXCLUDED)
        if self.folding is None:
            return
        words = hash(frozenset(backbone.tokenizer.get_vocab().items()))
        if self.fold is None:
            self.fold = read_folding(
                self.folding, backbone.tokenizer, backbone.decoder.out_features
            )
            self._folded_words = words
        elif words != self._folded_words:
            raise ValueError(
                "this head folds the terms of another vocabulary: make a head for each model"
            )

    def folded(self, reps: Tensor) -> Tensor:
        """What an encoder gives of the ``reps [N, V]`` of a call: folded, if there is a folding."""
        return reps if self.fold is None else self.fold(reps)

    def topk(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: TokenBatch, k: int
    ) -> TopK:
        """The k largest entries of each :meth:`folded` representation, without a gradient; by the
        fused kernel whichever head of this library it is, but with ``token_topk`` or folding, and
        of a head of a user's own, from all entries."""
        if self.token_topk is not None or self.fold is not None or self.own is not None:
            with torch.no_grad():
                reps = self.folded(self(hidden, weight, bias, tokens))
                return TopK(*largest_of_rows(reps, k))
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


class EagerHead(SpladeHead):
    """Materialises the logits ``[N, S, V]`` and every step after them: the common practice."""

    _head = staticmethod(padded_head)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: TokenBatch,
        memory: HeadMemory | None = None,
    ) -> Tensor:
        padded, mask = tokens.pad(hidden), tokens.padding_mask()
        variant = (self.pooling, self.activation, self.token_topk)
        return self._head(padded, weight, bias, mask, *variant)


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
        self._head = torch.compile(padded_head, dynamic=True)


class TiledHead(SpladeHead):
    """The eager (or compiled) head on one tile of the vocabulary after the other.

    Bounds the memory of the forward without a graph; with one, autograd keeps every tile. With
    ``token_topk`` the largest of each tile are found first, and then the largest of these.

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
        of_tile: Callable[..., Any] = padded_head if self.token_topk is None else largest_of_tile
        self._of_tile = torch.compile(of_tile, dynamic=True) if compiled else of_tile

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
        tiles = zip(weights, biases, strict=True)
        k = self.token_topk
        if k is None:
            variant = (self.pooling, self.activation, None)
            return torch.cat(
                [self._of_tile(padded, *rows, mask, *variant) for rows in tiles], dim=1
            )
        found = [self._of_tile(padded, *rows, mask, self.activation, k) for rows in tiles]
        # Tiles, and equal values within each, are in the order of the vocabulary.
        terms = torch.cat([terms + row * tile for row, (_, terms) in enumerate(found)], dim=2)
        values, places = largest(torch.cat([values for values, _ in found], dim=2), k)
        return pool_entries(values, terms.gather(2, places), weight.shape[0], self.pooling)


class HybridHead(SpladeHead):
    """The design that the Sparton paper measured (its Algorithms 2 and 3), for its maximum of
    ``log1p(relu(x))`` alone.

    cuBLAS products of vocabulary tiles through torch.compile, a kernel for the masked maximum of
    each tile, and a backward that adds with atomics: on a GPU its gradients differ in their last
    bits from call to call.

    Args:
        pooling, activation: "max" and "relu", the only ones of the paper's kernels.
        others: see :class:`SpladeHead`; without ``token_topk``, which these do not know either.

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
            raise ArgumentError(
                "HybridHead has the paper's kernels, which know max pooling and relu alone, got "
                "pooling={!r} and activation={!r}: take another head, such as {head}",
                *(pooling, activation),
                head=Instance("SpartonHead"),
            )
        if self.token_topk is not None:
            raise ArgumentError(
                "HybridHead has the paper's kernels, which pool all terms of a token, got "
                "token_topk={}: take another head, such as {head}",
                self.token_topk,
                head=Instance("SpartonHead"),
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
        check_variant(pooling, activation, fp8, self.token_topk)
        self.fp8 = fp8

    @property
    def serves_fp8(self) -> bool:
        """Whether its variant has a search in FP8."""
        return self.pooling == "max" and self.token_topk is None

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
            token_topk=self.token_topk,
            memory=memory,
        )
