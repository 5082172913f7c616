"""Bias and GELU, and gated GELU, as PyTorch operators. T tokens, D columns."""

from torch import Tensor

from sparton.kernels.dispatch import late
from sparton.kernels.encoder_layer.operands import check_operands, rows_of
from sparton.kernels.operator import Operator

_forward_kernel = late("sparton.kernels.encoder_layer.gelu.gelu_forward")
_backward_kernel = late("sparton.kernels.encoder_layer.gelu.gelu_backward")
_gated_kernel = late("sparton.kernels.encoder_layer.gelu.gated_gelu_forward")
_gated_backward_kernel = late("sparton.kernels.encoder_layer.gelu.gated_gelu_backward")


def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    return _forward_kernel()(rows_of(x), bias.contiguous()).view(x.shape)


def _gelu_gradients(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dx, dbias = _backward_kernel()(rows_of(grad), rows_of(x), bias.contiguous())
    return dx.view(x.shape), dbias.to(bias.dtype)


_operator = Operator("sparton::bias_gelu", _gelu, fake=lambda x, bias: x.new_empty(x.shape))
_operator.differentiable(("x", "bias"), _gelu_gradients)


def _gated(x: Tensor) -> Tensor:
    return _gated_kernel()(rows_of(x)).view(*x.shape[:-1], x.shape[-1] // 2)


def _gated_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return _gated_backward_kernel()(rows_of(grad), rows_of(x)).view(x.shape)


def _fake_gated(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


_gated_operator = Operator("sparton::gated_gelu", _gated, fake=_fake_gated)
_gated_operator.differentiable(("x",), _gated_gradient)


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
    return _operator(x, bias)


def gated_gelu(x: Tensor) -> Tensor:
    """``gelu(u) * gate``, where u is the first half of the columns and the gate the second;
    computed in fp32 with the normal distribution's function to 1e-7.

    Args:
        x: ``[..., 2 D]`` float16, bfloat16 or float32 on a GPU: a linear layer's product.

    Returns:
        ``[..., D]`` in the dtype of x. Differentiable once.

    Raises:
        ValueError: another dtype, or an odd number of columns.
    """
    check_operands(x)
    if x.shape[-1] % 2:
        raise ValueError(f"x must have two halves, got {x.shape[-1]} columns")
    return _gated_operator(x)
