"""Which models of transformers run with layers of ours."""

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel

from sparton.models.bert_families import BERT_FAMILIES
from sparton.models.decoder_layers import DECODERS, fuse_decoder
from sparton.models.modernbert import fuse_modernbert

# What fuses a part of a model, by the model type of its configuration.
FAMILIES: dict[str, Callable[..., None]] = {
    **{kind: family.fuse_below for kind, family in BERT_FAMILIES.items()},
    **{kind: partial(fuse_decoder, family=kind) for kind in DECODERS},
    "modernbert": fuse_modernbert,
}


def fuse_layers(model: PreTrainedModel, *, checkpointed: bool = False) -> None:
    """The layers of BERT's, RoBERTa's, ModernBERT's and Llama's kind in ``model`` by fused ones, in
    place; names and parameters stay. Bodies with other parts than transformers' own stay as they
    are.

    Attention is packed and has no dropout: the caller has refused other models.

    Args:
        model: of a family in :data:`FAMILIES`; any other stays as it is.
        checkpointed: layers are computed again in the backward pass. They then hand on one tensor,
            as what is between them is all that is kept.
    """
    fuse = FAMILIES.get(model.config.model_type)
    if fuse is not None:
        for part in list(model.modules()):
            fuse(part, both=not checkpointed)
