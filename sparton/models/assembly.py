"""The encoder that a backbone and a head make together."""

from torch import nn

from sparton.arguments import ArgumentError, Instance
from sparton.models.backbone import Backbone
from sparton.models.body import EncoderBody
from sparton.models.cached import CachedBackbone
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.dense import DenseEncoder
from sparton.models.encoder import Encoder
from sparton.models.heads import SpladeHead
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.pooling import Pooling, pooling_mode
from sparton.models.splade import SpladeEncoder


def build_encoder(
    backbone: EncoderBody | CachedBackbone, head: nn.Module | AutoencoderHead
) -> Encoder:
    """The kind of encoder is the head's choice.

    Raises:
        ValueError: the head needs what the backbone lacks, or is no head.
    """
    encoder = _of_kind(backbone, head)
    encoder.origin = backbone.origin
    return encoder


def _of_kind(backbone: EncoderBody | CachedBackbone, head: nn.Module | AutoencoderHead) -> Encoder:
    if isinstance(head, AutoencoderHead):
        return AutoencoderEncoder(backbone, head)
    if isinstance(backbone, CachedBackbone):
        raise ArgumentError(
            "{} reads the states of all tokens, but this backbone has one embedding per text: set "
            "{head}, or choose a model as the backbone",
            type(head).__name__,
            head=Instance("AutoencoderHead"),
        )
    match head:
        case Pooling():
            pooling_mode(head.mode)
            return DenseEncoder(backbone, head, cosine=head.normalize)
        case ColbertHead():
            return ColbertEncoder(backbone, head)
        case SpladeHead():
            return SpladeEncoder(_with_decoder(backbone, head), head)
        case JointHead():
            return JointEncoder(_with_decoder(backbone, head), head)
    raise ValueError(f"{type(head).__name__} is no head of an encoder")


def _with_decoder(backbone: EncoderBody, head: nn.Module) -> Backbone:
    if not isinstance(backbone, Backbone):
        raise ValueError(
            f"{type(head).__name__} gives terms their weights with a masked-language-modelling "
            f"head, and this {type(backbone.model).__name__} has none: choose a backbone that "
            "was trained with masked-language modelling, or a head of token vectors (colbert)"
        )
    return backbone
