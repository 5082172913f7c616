"""Dropout and layer normalisation that cost what their traffic with memory costs.

In a compiled encoder these two are most of what is not a matrix product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MULTIPLIERS = 0x7FEB352D, 0x846CA68B - 2**32


class FusedDropout(nn.Dropout):
    """Dropout that leaves a compiled graph little to compute.

    PyTorch's compiler draws ten rounds of Philox for each number, which takes longer than the
    layer around it needs for its memory; here a number is the hash of its place and of one random
    seed per call, and the backward computes it again where others would store a mask. In eager
    mode it is ``nn.Dropout``.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and 0 < self.p < 1 and torch.compiler.is_compiling():
            return hashed_dropout(x, self.p)
        return super().forward(x)


def hashed_dropout(x: Tensor, p: float) -> Tensor:
    """``x`` with a share ``p`` of its numbers set to 0 and the others divided by ``1 - p``.

    Which ones is a function of their places and of a seed from PyTorch's global generator.
    """
    seed = torch.randint(-(2**31), 2**31 - 1, (), dtype=torch.int32, device=x.device)
    places = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    kept = (hashed(places, seed) & 0x7FFFFFFF) >= round(p * 2**31)
    return torch.where(kept, x * (1 / (1 - p)), 0)


def hashed(places: Tensor, seed: Tensor) -> Tensor:
    """Evenly distributed int32 from int32, a permutation for every int32 seed: the finaliser
    lowbias32 (https://nullprogram.com/blog/2018/07/31/), the seed between its two rounds."""
    first, second = _MULTIPLIERS
    x = (places ^ _shifted(places, 16)) * first
    x = x ^ _shifted(x, 15) ^ seed
    x = x * second
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left: int32 has a sign that PyTorch would draw along."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


class HalfLayerNorm(nn.LayerNorm):
    """Layer normalisation whose result is bfloat16 under bfloat16 autocast.

    Statistics and products stay fp32. Autocast alone gives fp32 results, and these are what an
    encoder adds to in the next layer: twice the traffic for digits that its matrix products do not
    read.
    """

    def forward(self, x: Tensor) -> Tensor:
        result = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            if dtype == torch.bfloat16:
                return result.to(dtype)
        return result


def replace_dropout(model: nn.Module) -> None:
    """Every ``nn.Dropout`` below ``model`` by a :class:`FusedDropout`, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                setattr(parent, name, FusedDropout(child.p).train(child.training))


def replace_layer_norms(model: nn.Module) -> None:
    """Every ``nn.LayerNorm`` below ``model`` by a :class:`HalfLayerNorm` of the same parameters,
    in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.LayerNorm:
                norm = HalfLayerNorm(child.normalized_shape, child.eps, elementwise_affine=False)
                norm.elementwise_affine = child.elementwise_affine
                norm.weight, norm.bias = child.weight, child.bias
                setattr(parent, name, norm.train(child.training))
