"""Where the logits of a language model begin, before SPLADE cuts them at zero.

D hidden width, V vocabulary.
"""

import math

import torch
from torch import nn
from transformers import BertForMaskedLM, ModernBertForMaskedLM, XLMRobertaForMaskedLM

from sparton.arguments import ArgumentError
from sparton.models.backbone import Backbone


def start_logits(
    backbone: Backbone, *, center: bool = False, scale: float = 1.0, shift: float = 0.0
) -> None:
    """Make the logits of a model ``scale * (logits - shared) + shift``, folded into its weights in
    place.

    Args:
        backbone: with any language-modelling head.
        center: let ``shared`` be what all logits of a token have in common, the product of its
            state with the mean row of the decoder; else it is zero. Softmax does not see it, so
            that the language model stays the same, while in a causal one it may hide from a maximum
            what the terms differ by. A decoder that is tied to the embeddings becomes a matrix of
            its own, of V D parameters.
        scale: goes into the last LayerNorm of the head, so that a tied decoder stays tied and the
            checkpoint a stock one. Heads without one, as those of causal models, have it in the
            decoder, which is untied as well. ModernBERT's representations collapse in training
            unless its logits start about 16 times smaller (arXiv 2606.18811).
        shift: added to the decoder's bias, which is made where there is none. A negative one thins
            out models that start with every term active; -c alone gives
            ``log(1 + relu(x - c))``.

    Raises:
        ArgumentError: the head holds its decoder in a form of its own, and it would have to be
            changed; or a scale that is not positive.
    """
    if not 0 < scale < math.inf:
        raise ArgumentError("{logit_scale} must be positive and finite", logit_scale=scale)
    if not math.isfinite(shift):
        raise ArgumentError("{logit_shift} must be finite", logit_shift=shift)
    if center:
        _untie(backbone, "center", center)
        _center(backbone)
    if scale != 1:
        _scale(backbone, scale)
    if shift:
        _shift(backbone, shift)
    if center or scale != 1 or shift:
        backbone.base = None  # of which adapters alone could be saved


@torch.no_grad()
def start_near_identity(backbone: Backbone, *, bias: float) -> None:
    """Let the head read the last hidden state as it is: logits = normed(hidden) . E + bias.

    For the heads of BERT and XLM-RoBERTa (dense, GELU, LayerNorm, decoder). The dense layer becomes
    the identity plus a shift of 4, where GELU is a straight line (the error is below 0.01 for
    hidden values above -1), and the LayerNorm takes the shift out again. ModernBERT's head has no
    bias for the shift: GELU then leaves of the state what is positive. All vocabulary entries start
    at ``bias``: at 0 half of them would be active in every text.
    """
    if isinstance(backbone.model, BertForMaskedLM):
        transform = backbone.model.cls.predictions.transform
        dense, norm = transform.dense, transform.LayerNorm
    elif isinstance(backbone.model, XLMRobertaForMaskedLM):
        dense, norm = backbone.model.lm_head.dense, backbone.model.lm_head.layer_norm
    elif isinstance(backbone.model, ModernBertForMaskedLM):
        dense, norm = backbone.model.head.dense, backbone.model.head.norm
    else:
        raise ValueError(f"{type(backbone.model).__name__} has another head than BERT's")
    nn.init.eye_(dense.weight)
    norm.weight.fill_(1.0)
    if dense.bias is not None:
        dense.bias.fill_(4.0)
        norm.bias.zero_()
    backbone.decoder.bias.fill_(bias)


@torch.no_grad()
def _center(backbone: Backbone) -> None:
    weight = backbone.decoder.weight
    weight.sub_(weight.float().mean(0).to(weight.dtype))


@torch.no_grad()
def _scale(backbone: Backbone, scale: float) -> None:
    body = set(backbone.model.base_model.modules())
    norms = [m for m in backbone.model.modules() if isinstance(m, nn.LayerNorm) and m not in body]
    if norms:
        for parameter in norms[-1].parameters():
            parameter.mul_(scale)
    else:
        _untie(backbone, "logit_scale", scale)
        backbone.decoder.weight.mul_(scale)
    if backbone.decoder.bias is not None:
        backbone.decoder.bias.mul_(scale)


@torch.no_grad()
def _shift(backbone: Backbone, shift: float) -> None:
    backbone.need_bias().add_(shift)


def _untie(backbone: Backbone, name: str, value: object) -> None:
    try:
        backbone.untie()
    except ValueError as error:
        raise ArgumentError(
            f"{{{name}}} changes the decoder alone, but {{}}: leave it out", error, **{name: value}
        ) from error
