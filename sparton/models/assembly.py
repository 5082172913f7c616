"""Which encoder a backbone and a head make."""

from sparton.models.backbone import Backbone
from sparton.models.encoder import Encoder
from sparton.models.heads import SpladeHead
from sparton.models.splade import SpladeEncoder


def build_encoder(backbone: Backbone, head: SpladeHead) -> Encoder:
    """The encoder of a head's kind on a backbone."""
    return SpladeEncoder(backbone, head)
