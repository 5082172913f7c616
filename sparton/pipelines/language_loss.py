"""Cross-entropy of tokens that a language model predicts, without all their logits at once.

M predicted tokens, D hidden width, V vocabulary.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparton.models.output_embeddings import Decoder

LOGITS_AT_ONCE = 2**27  # 512 MiB in fp32


class Prediction(NamedTuple):
    """Sum of the losses of some tokens, and how many of them are predicted rightly."""

    loss: Tensor
    right: Tensor


def language_loss(
    decoder: Decoder, states: Tensor, targets: Tensor, relu_weight: float = 0.0
) -> Tensor:
    """The sum over tokens of their cross-entropy, with a graph; the logits of a part of the tokens
    are computed again in the backward pass.

    Args:
        decoder: ``[M, D]`` to ``[M, V]``.
        states: ``[M, D]``, what the decoder predicts from.
        targets: int64 ``[M]``.
        relu_weight: of the cross-entropy of ``log1p(relu(logits))`` in the place of the logits,
            which is added (Xu et al., CSPLADE, arXiv 2504.10816, equation 3).
    """
    parts = list(_parts(states, targets, decoder))
    if len(parts) <= 1:
        return _loss(decoder, states, targets, relu_weight)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # nothing is drawn
    losses = [again(_loss, decoder, *part, relu_weight) for part in parts]
    return torch.stack(losses).sum()


@torch.no_grad()
def predict(decoder: Decoder, states: Tensor, targets: Tensor) -> Prediction:
    """How well tokens are predicted; see :func:`language_loss`."""
    loss, right = states.new_zeros((), dtype=torch.float32), targets.new_zeros(())
    for some, wanted in _parts(states, targets, decoder):
        logits = decoder(some).float()
        loss += F.cross_entropy(logits, wanted, reduction="sum")
        right += (logits.argmax(1) == wanted).sum()
    return Prediction(loss, right)


def _loss(decoder: Decoder, states: Tensor, targets: Tensor, relu_weight: float) -> Tensor:
    logits = decoder(states).float()
    loss = F.cross_entropy(logits, targets, reduction="sum")
    if relu_weight:
        saturated = logits.relu().log1p()
        loss = loss + relu_weight * F.cross_entropy(saturated, targets, reduction="sum")
    return loss


def _parts(states: Tensor, targets: Tensor, decoder: Decoder) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(1, LOGITS_AT_ONCE // decoder.out_features)
    return zip(states.split(rows), targets.split(rows), strict=True)
