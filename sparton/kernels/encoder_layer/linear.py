"""Linear layers in 16 bits with their bias, and GELU, in the fastest way that a device has.

T rows of x, K columns of x and of the weight, N rows of the weight. Nothing here has a graph, and
x lies on the current device.
"""

import torch
from torch import Tensor

from sparton.kernels.dispatch import is_hopper, late, on_its_device

_gelu = late("sparton.kernels.encoder_layer.gelu.gelu_forward")
_norm = late("sparton.kernels.encoder_layer.normalization.norm_forward")
_hopper = late("sparton.kernels.encoder_layer.hopper_products.hopper_linear")
_suits_hopper = late("sparton.kernels.encoder_layer.hopper_products.suits_hopper")


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x weight^T + bias`` ``[T, N]`` of ``x [T, K]``, ``weight [N, K]`` and ``bias [N]``, all in
    one dtype, contiguous."""
    if _is_for_hopper(x, weight):
        return _hopper()(x, weight, bias)[0]
    return torch.addmm(bias, x, weight.t())


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x weight^T + bias)`` as one product, operands as of :func:`linear`. On Hopper it is
    within 2.5e-5 of GELU and the hardware's tanh. Elsewhere CUDA's library ends it with GELU's tanh
    form, off by 5e-4 at most, of sums that have not been rounded: rounding them to 16 bits, as
    between two kernels, changes those above 1 by as much."""
    if _is_for_hopper(x, weight):
        return _hopper()(x, weight, bias, gelu=True)[0]
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)


def linear_gelu_and_product(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """``gelu(x weight^T + bias)``, and ``x weight^T``, which its backward reads; the bias may have
    any float dtype."""
    if _is_for_hopper(x, weight):
        return _hopper()(x, weight, bias, gelu=True, save=True)
    product = torch.mm(x, weight.t())
    return _gelu()(product, bias), product


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad^T x`` ``[N, K]`` of ``grad [T, N]`` and ``x [T, K]``. For a weight in fp32 it comes as
    it was summed, where the device's product gives it; otherwise in their dtype."""
    if grad.is_cuda and dtype == torch.float32:
        return torch.mm(grad.t(), x, out_dtype=dtype)
    return torch.mm(grad.t(), x)


@on_its_device
def linear_gelu_norm(
    x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, *, eps: float
) -> Tensor:
    """``LayerNorm(gelu(x weight^T + bias))``, what BERT's masked-LM head does before its decoder;
    operands as of :func:`linear`, and ``gain`` and ``shift [N]``."""
    activated = linear_gelu(x, weight, bias)
    options = {"p": 0.0, "eps": eps, "dtype": x.dtype, "copy": None, "save": False}
    return _norm()(activated, None, None, gain, shift, None, **options).out


def _is_for_hopper(x: Tensor, weight: Tensor) -> bool:
    """Whether our own kernel serves these operands, and is faster."""
    return is_hopper(x.device) and _suits_hopper()(x, weight)
