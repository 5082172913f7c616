"""Models of transformers whose layers are BERT's, and how they get ours."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from sparton.models.bert_ends import FusedEmbeddings, FusedTransform
from sparton.models.bert_layers import FusedEncoder, FusedLayer
from sparton.models.bert_parts import Intermediate, PostNorm, SelfAttention

# Parts of a layer by their place in it, and what they are called in transformers.
_PARTS = {
    "attention.self": "SelfAttention",
    "attention.output": "SelfOutput",
    "intermediate": "Intermediate",
    "output": "Output",
}
_STOCK: dict[str, type[nn.Module]] = {
    **dict.fromkeys(("query", "key", "value", "dense"), nn.Linear),
    **{f"{part}_embeddings": nn.Embedding for part in ("word", "position", "token_type")},
    "dropout": nn.Dropout,
    "LayerNorm": nn.LayerNorm,
}


class BertFamily(NamedTuple):
    """A family of models whose layers are BERT's; the adapter between transformers and ours.

    Attributes:
        module: where transformers has its classes.
        prefix: with which their names begin.
    """

    module: str
    prefix: str

    def stock(self, part: str) -> type[nn.Module]:
        """transformers' own class of a part."""
        return getattr(import_module(f"transformers.models.{self.module}"), self.prefix + part)

    def has(self, encoder: nn.Module) -> bool:
        """Whether ``encoder`` and all of its layers are as transformers builds them."""
        if type(encoder) is not self.stock("Encoder"):
            return False
        layers = list(encoder.get_submodule("layer").children())
        return bool(layers) and all(map(self._is_stock, layers))

    def fuse_below(self, parent: nn.Module, *, both: bool) -> None:
        """The encoders among its children by ours, with the embeddings before them, and what comes
        behind them, in place."""
        for name, child in list(parent.named_children()):
            if self.has(child):
                setattr(parent, name, self._fused(child, both=both))
                first = getattr(parent, "embeddings", None)
                if first is not None and self._has_parts(first, "Embeddings"):
                    parent.embeddings = FusedEmbeddings(first).train(first.training)
            elif self.prefix == "Bert" and self._has_parts(child, "PredictionHeadTransform"):
                setattr(parent, name, _of_children(FusedTransform, child).train(child.training))

    def _fused(self, encoder: nn.Module, *, both: bool) -> FusedEncoder:
        """The same layers with our parts."""
        layers = encoder.get_submodule("layer")
        assert isinstance(layers, nn.ModuleList)
        fused = nn.ModuleList(_fused_layer(layer, both) for layer in layers)
        return FusedEncoder(fused, both=both).train(encoder.training)

    def _is_stock(self, layer: Any) -> bool:
        if {name for name, _ in layer.named_children()} != {"attention", "intermediate", "output"}:
            return False  # with attention to an encoder, too
        if layer.attention.self.is_causal:
            return False  # of a decoder (``is_decoder``), whose tokens see none behind them
        return type(layer) is self.stock("Layer") and all(
            self._has_parts(layer.get_submodule(place), kind) for place, kind in _PARTS.items()
        )

    def _has_parts(self, part: nn.Module, kind: str) -> bool:
        """Whether a part is as transformers builds it, and so are those within it."""
        return type(part) is self.stock(kind) and all(
            type(child) is _STOCK.get(name, type(child))
            and getattr(child, "bias", child) is not None
            for name, child in part.named_children()
        )


BERT_FAMILIES = {
    "bert": BertFamily("bert.modeling_bert", "Bert"),
    "roberta": BertFamily("roberta.modeling_roberta", "Roberta"),
    "xlm-roberta": BertFamily("xlm_roberta.modeling_xlm_roberta", "XLMRoberta"),
    "camembert": BertFamily("camembert.modeling_camembert", "Camembert"),
    "electra": BertFamily("electra.modeling_electra", "Electra"),
}


def _fused_layer(layer: Any, both: bool) -> FusedLayer:
    """A layer with the same parameters, of our parts."""
    attention = layer.attention
    attention.self = SelfAttention(attention.self)
    attention.output = _of_children(PostNorm, attention.output)
    return FusedLayer(
        attention,
        _of_children(Intermediate, layer.intermediate),
        _of_children(partial(PostNorm, both=both), layer.output),
    )


def _of_children(make: Callable[..., nn.Module], part: nn.Module) -> nn.Module:
    return make(**dict(part.named_children()))
