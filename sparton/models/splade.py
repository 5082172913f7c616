"""The learned sparse encoder: a backbone and a head.

T packed tokens, N sequences, D hidden width, V vocabulary.
"""

import torch
from torch import Tensor

from sparton.kernels.splade_head import HeadMemory, TopK
from sparton.models.backbone import Backbone
from sparton.models.encoder import Encoder
from sparton.models.heads import SpladeHead
from sparton.representations import Representations
from sparton.types import Side, TokenBatch


class SpladeEncoder(Encoder):
    """Texts, as packed tokens, to non-negative term weights over the vocabulary.

    A decoder tied to the input embeddings is one parameter: it appears once in ``parameters()``
    and collects the gradients of both uses.

    Args:
        backbone: packed tokens to hidden states ``[T, D]``, with the decoder beside it.
        head: ``head(hidden, weight, bias, tokens)`` to representations fp32 ``[N, V]``.
    """

    def __init__(self, backbone: Backbone, head: SpladeHead) -> None:
        super().__init__(backbone.tokenizer, backbone.max_length)
        self.backbone = backbone
        head.settle(backbone)
        self.head = head
        self.markup = head.markup

    def forward(self, tokens: TokenBatch, memory: HeadMemory | None = None) -> Tensor:
        """Representations fp32 ``[N, V]``, by default log1p(relu(maximum over the tokens))."""
        inputs = self._inputs(self.backbone(tokens), tokens)
        return self.head.folded(self.head(*inputs, memory))

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        """:meth:`forward` of either side."""
        return Representations(self(tokens))

    def encode_both(
        self, queries: TokenBatch, documents: TokenBatch, memory: HeadMemory | None = None
    ) -> tuple[Representations, Representations]:
        """See :meth:`~sparton.models.body.EncoderBody.in_one_pass`."""
        sides = queries, documents
        states = self.backbone.in_one_pass(self.backbone, *sides)
        of_queries, of_documents = (
            self.head.folded(self.head(*inputs, memory))
            for inputs in map(self._inputs, states, sides)
        )
        return Representations(of_queries), Representations(of_documents)

    def flops_per_token(
        self, sequence_length: float, side: Side = "document", *, training: bool = True
    ) -> float:
        """See :meth:`Backbone.flops_per_token`."""
        return self.backbone.flops_per_token(sequence_length, training=training)

    @torch.no_grad()
    def topk(self, tokens: TokenBatch, side: Side, k: int) -> TopK:
        """The min(k, V) largest term weights of each text, without the dense representations; see
        :func:`~sparton.kernels.splade_head.splade_head_topk`."""
        inputs = self._inputs(self.backbone(tokens), tokens)
        return self.head.topk(*inputs, min(k, self.vocabulary_size))

    def _inputs(
        self, states: Tensor, tokens: TokenBatch
    ) -> tuple[Tensor, Tensor, Tensor | None, TokenBatch]:
        """What the head reads, of transformed states ``[T, D]`` those that are pooled."""
        states, tokens = tokens.to_pool(states)
        decoder = self.backbone.decoder
        return states, decoder.weight, decoder.bias, tokens

    @property
    def vocabulary_size(self) -> int:
        """V; it may exceed the tokenizer's size where a model pads its vocabulary."""
        return self.backbone.decoder.out_features
