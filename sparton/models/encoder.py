"""The learned sparse encoder: a backbone and a head.

T packed tokens, N sequences, D hidden width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from sparton.models.backbone import Backbone
from sparton.types import TokenBatch


class SpladeEncoder(nn.Module):
    """Texts, as packed tokens, to non-negative term weights over the vocabulary.

    A decoder tied to the input embeddings is one parameter: it appears once in ``parameters()``
    and collects the gradients of both uses.

    Args:
        backbone: packed tokens to hidden states ``[T, D]``, with the decoder beside it.
        head: ``head(hidden, weight, bias, tokens)`` to representations fp32 ``[N, V]``.
    """

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, tokens: TokenBatch) -> Tensor:
        """Representations fp32 ``[N, V]``: log1p(relu(maximum over a sequence's tokens))."""
        hidden = self.backbone(tokens)
        decoder = self.backbone.decoder
        return self.head(hidden, decoder.weight, decoder.bias, tokens)

    @property
    def vocabulary_size(self) -> int:
        """V; it may exceed the tokenizer's size where a model pads its vocabulary."""
        return self.backbone.decoder.out_features

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.backbone.tokenizer

    @property
    def device(self) -> torch.device:
        return self.backbone.decoder.weight.device
