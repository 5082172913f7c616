"""The last matrix of a masked-language model, and how a head runs without it.

H hidden width of the body, D width of what the decoder reads, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class DecoderPlace(NamedTuple):
    """Where the decoder of a masked-language model was found.

    Attributes:
        decoder: ``weight [V, D]`` and ``bias [V]`` or None; what follows the head's transform.
        parent, name: the attribute that holds the part of the model with the decoder in it.
        whole: that part as transformers made it.
        rest: what stands in its place when the decoder is gone, so that what the model calls
            logits are the transformed states.
    """

    decoder: "Decoder"
    parent: nn.Module
    name: str
    whole: nn.Module
    rest: nn.Module

    def remove(self) -> None:
        setattr(self.parent, self.name, self.rest)

    def restore(self) -> None:
        setattr(self.parent, self.name, self.whole)


class SplitDecoder(nn.Module):
    """MobileBERT's decoder: columns tied to its narrow embeddings, and columns of its own.

    Args:
        tied: linear layer of V rows, the embeddings, with the bias.
        own: linear layer whose weight ``[D - E, V]`` holds the other columns, transposed.
    """

    def __init__(self, tied: nn.Linear, own: nn.Linear) -> None:
        super().__init__()
        self.tied, self.own = tied, own

    @property
    def weight(self) -> Tensor:
        """``[V, D]``."""
        return torch.cat([self.tied.weight, self.own.weight.t()], dim=1)

    @property
    def bias(self) -> Tensor:
        """``[V]``."""
        return self.tied.bias

    @property
    def out_features(self) -> int:
        """V."""
        return self.tied.out_features

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.weight, self.bias)


Decoder = nn.Linear | SplitDecoder


def find_decoder(mlm: Any) -> DecoderPlace:
    """The decoder of a masked-language model of transformers; nothing is changed yet.

    Raises:
        ValueError: the model has none, or in a form unknown here.
    """
    kind = type(mlm).__name__
    decoder = mlm.get_output_embeddings()
    if not isinstance(decoder, nn.Linear):
        raise ValueError(f"{kind} has no linear decoder; use a masked-LM model")
    if mlm.config.model_type == "mobilebert":
        whole = mlm.cls.predictions
        split = SplitDecoder(decoder, whole.dense)
        return DecoderPlace(split, mlm.cls, "predictions", whole, whole.transform)
    if hasattr(mlm, "lm_predictions"):
        head = mlm.lm_predictions
        tied = linear_of(mlm.get_input_embeddings().weight, head.lm_head.bias)
        return DecoderPlace(tied, head, "lm_head", head.lm_head, _DebertaTransform(head.lm_head))
    if decoder.out_features != mlm.config.vocab_size:
        raise ValueError(
            f"{kind} gives {decoder.out_features} logits for {mlm.config.vocab_size} tokens: its "
            "head has a form that is not known here"
        )
    return DecoderPlace(decoder, *_place_of(decoder, mlm), decoder, nn.Identity())


class _DebertaTransform(nn.Module):
    """The head of DeBERTa that reads its decoder from the embeddings (``legacy=False``), without
    that product."""

    def __init__(self, lm_head: Any) -> None:
        super().__init__()
        self.dense, self.LayerNorm = lm_head.dense, lm_head.LayerNorm
        self.transform_act_fn = lm_head.transform_act_fn

    def forward(self, states: Tensor, word_embeddings: nn.Module) -> Tensor:
        return self.LayerNorm(self.transform_act_fn(self.dense(states)))


def linear_of(weight: nn.Parameter, bias: nn.Parameter) -> nn.Linear:
    """A linear layer of these very parameters, which others may hold, too."""
    decoder = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    decoder.weight, decoder.bias = weight, bias
    return decoder


def _place_of(child: nn.Module, root: nn.Module) -> tuple[nn.Module, str]:
    for parent in root.modules():
        for name, module in parent.named_children():
            if module is child:
                return parent, name
    raise ValueError(f"{type(root).__name__} does not hold its own output embeddings")
