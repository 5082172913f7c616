"""Dropout and layer normalisation that cost an encoder no more than their traffic with memory, and
what our kernels can do in the place of others."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation, SiLUActivation

from sparton.kernels.dispatch import autocast_dtype
from sparton.kernels.encoder_layer import FLOATS, hashed_dropout


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
        return result.to(torch.bfloat16) if autocast_dtype(x) == torch.bfloat16 else result


def has_kernels(x: Tensor) -> bool:
    """Whether our kernels may follow the product ``x``."""
    return x.is_cuda and x.dtype in FLOATS


def is_gelu(activation: nn.Module) -> bool:
    """Whether it is the exact one."""
    if isinstance(activation, nn.GELU):
        return activation.approximate == "none"
    return type(activation) is GELUActivation


def is_silu(activation: nn.Module) -> bool:
    """Whether it is ``x sigmoid(x)``."""
    return type(activation) in (nn.SiLU, SiLUActivation)


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


def _halved(given: nn.LayerNorm) -> HalfLayerNorm:
    norm = HalfLayerNorm(given.normalized_shape, given.eps, elementwise_affine=False)
    norm.elementwise_affine = given.elementwise_affine
    norm.weight, norm.bias = given.weight, given.bias
    return norm
