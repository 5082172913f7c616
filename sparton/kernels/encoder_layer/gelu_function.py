"""Bias and GELU as PyTorch operators: autograd, torch.compile.

T tokens, D columns.

Reached as :mod:`sparton.kernels.dispatch` says.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sparton.kernels.dispatch import needs_operators
from sparton.kernels.encoder_layer.operands import check_operands, rows_of


@functools.cache
def _kernels() -> ModuleType:
    from sparton.kernels.encoder_layer import gelu

    return gelu


def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    return _kernels().gelu_forward(rows_of(x), bias.contiguous()).view(x.shape)


def _gelu_gradients(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dx, dbias = _kernels().gelu_backward(rows_of(grad), rows_of(x), bias.contiguous())
    return dx.view(x.shape), dbias.to(bias.dtype)


@torch.library.custom_op("sparton::bias_gelu", mutates_args=())
def _gelu_op(x: Tensor, bias: Tensor) -> Tensor:
    return _gelu(x, bias)


@_gelu_op.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("sparton::bias_gelu_backward", mutates_args=())
def _gelu_backward_op(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return _gelu_gradients(grad, x, bias)


@_gelu_backward_op.register_fake
def _(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _gelu_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gelu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    # The operator refuses second derivatives where someone asks for them.
    run = _gelu_backward_op if torch.is_grad_enabled() or needs_operators() else _gelu_gradients
    return run(grad, *ctx.saved_tensors)


_gelu_op.register_autograd(_gelu_backward, setup_context=_gelu_setup)


class _BiasGelu(torch.autograd.Function):
    """The operators for eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        output = _gelu(*inputs)
        _gelu_setup(ctx, inputs, output)
        return output

    backward = staticmethod(_gelu_backward)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x + bias)`` with the normal distribution's function to 1e-7, computed in fp32.

    Args:
        x: ``[..., D]`` float16, bfloat16 or float32 on a GPU: a linear layer's product.
        bias: ``[D]`` of any of these dtypes.

    Returns:
        ``[..., D]`` in the dtype of x. Differentiable once; the bias' gradient is summed in fp32 in
        a fixed order.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    check_operands(x, bias)
    if needs_operators():
        return _gelu_op(x, bias)
    if torch.is_grad_enabled() and (x.requires_grad or bias.requires_grad):
        return _BiasGelu.apply(x, bias)
    return _gelu(x, bias)
