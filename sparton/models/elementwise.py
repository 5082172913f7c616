"""What an encoder computes between its matrix products, at the cost of its traffic with memory.

On a GPU, layers of the BERT and RoBERTa kinds run our kernels, compiled or not. In other encoders
dropout and layer normalisation are made so that torch.compile fuses them well.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation

from sparton.kernels.encoder_layer import FLOATS, bias_gelu, hashed_dropout, post_norm

# Classes of transformers that compute what PostNorm and BiasGelu do.
_FAMILIES = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra")
_POST_NORMS = {f"{family}{part}" for family in _FAMILIES for part in ("SelfOutput", "Output")}
_INTERMEDIATES = {f"{family}Intermediate" for family in _FAMILIES}


class FusedDropout(nn.Dropout):
    """Dropout that leaves a compiled graph little to compute: a hash, and no mask to store.

    In eager mode it is ``nn.Dropout``.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and 0 < self.p < 1 and torch.compiler.is_compiling():
            return hashed_dropout(x, self.p)
        return super().forward(x)


class HalfLayerNorm(nn.LayerNorm):
    """Layer normalisation whose result is bfloat16 under bfloat16 autocast.

    Statistics and products stay fp32. Autocast alone gives fp32 results, and these are what an
    encoder adds to in the next layer: twice the traffic for digits that its matrix products do not
    read.
    """

    def forward(self, x: Tensor) -> Tensor:
        result = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return result.to(torch.bfloat16) if _autocast_dtype(x) == torch.bfloat16 else result


class PostNorm(nn.Module):
    """``LayerNorm(residual + dropout(dense(x)))``, the end of both halves of a post-norm layer.

    Args:
        dense, dropout, LayerNorm: the parts, named as in transformers.
    """

    def __init__(self, dense: nn.Linear, dropout: nn.Dropout, LayerNorm: nn.LayerNorm) -> None:
        super().__init__()
        self.dense, self.dropout, self.LayerNorm = dense, dropout, LayerNorm

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        p, norm = self.dropout.p if self.dropout.training else 0.0, self.LayerNorm
        if p == 1 or not _has_kernels(hidden_states, self.dense):
            return norm(self.dropout(self.dense(hidden_states)) + input_tensor)
        product = F.linear(hidden_states, self.dense.weight)
        dtype = _autocast_dtype(product)
        if dtype is not None:  # what a normalisation gives under autocast
            half = dtype == torch.bfloat16 and isinstance(norm, HalfLayerNorm)
            dtype = dtype if half else torch.float32
        return post_norm(
            product, self.dense.bias, input_tensor, norm.weight, norm.bias,
            eps=norm.eps, p=p, dtype=dtype,
        )  # fmt: skip


class BiasGelu(nn.Module):
    """``gelu(dense(x))``, the middle of a layer."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _has_kernels(hidden_states, self.dense):
            return F.gelu(self.dense(hidden_states))
        return bias_gelu(F.linear(hidden_states, self.dense.weight), self.dense.bias)


def _has_kernels(x: Tensor, dense: nn.Module) -> bool:
    """Whether our kernels may follow the product of ``x`` with the weight of ``dense``, whose own
    forward they pass over: an adapter's must not be."""
    return x.is_cuda and x.dtype in FLOATS and type(dense) is nn.Linear


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """None where autocast is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def fuse_layers(model: nn.Module) -> None:
    """The ends of BERT's and RoBERTa's layers below ``model`` by :class:`PostNorm`, and their
    activations, if these are the exact GELU, by :class:`BiasGelu`; in place, names and parameters
    stay. Layers with other parts than transformers' own stay as they are."""
    _replace(model, _fused)


def replace_dropout(model: nn.Module) -> None:
    """Every ``nn.Dropout`` below ``model`` by a :class:`FusedDropout`, in place."""
    _replace(model, lambda part: FusedDropout(part.p) if type(part) is nn.Dropout else None)


def replace_layer_norms(model: nn.Module) -> None:
    """Every ``nn.LayerNorm`` below ``model`` by a :class:`HalfLayerNorm` of the same parameters,
    in place."""
    _replace(model, lambda part: _halved(part) if type(part) is nn.LayerNorm else None)


def _replace(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Every module below ``model`` by what is made of it, in the same mode; None leaves it."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            made = make(child)
            if made is not None:
                setattr(parent, name, made.train(child.training))


def _fused(module: nn.Module) -> nn.Module | None:
    kind, parts = type(module).__name__, dict[str, Any](module.named_children())
    if kind in _POST_NORMS and _are_stock(parts):
        return PostNorm(**parts)
    if kind in _INTERMEDIATES and _are_stock(parts) and _is_gelu(parts["intermediate_act_fn"]):
        return BiasGelu(parts["dense"])
    return None


def _are_stock(parts: dict[str, Any]) -> bool:
    kinds = {"dense": nn.Linear, "dropout": nn.Dropout, "LayerNorm": nn.LayerNorm}
    return all(
        type(part) is kinds.get(name, type(part)) and getattr(part, "bias", part) is not None
        for name, part in parts.items()
    )


def _is_gelu(activation: nn.Module) -> bool:
    if isinstance(activation, nn.GELU):
        return activation.approximate == "none"
    return type(activation) is GELUActivation


def _halved(given: nn.LayerNorm) -> HalfLayerNorm:
    norm = HalfLayerNorm(given.normalized_shape, given.eps, elementwise_affine=False)
    norm.elementwise_affine = given.elementwise_affine
    norm.weight, norm.bias = given.weight, given.bias
    return norm
