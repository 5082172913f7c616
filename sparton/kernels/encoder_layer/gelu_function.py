"""Bias and GELU as a PyTorch operator. T tokens, D columns."""

from torch import Tensor

from sparton.kernels.dispatch import late
from sparton.kernels.encoder_layer.operands import check_operands, rows_of
from sparton.kernels.operator import Operator

_forward_kernel = late("sparton.kernels.encoder_layer.gelu.gelu_forward")
_backward_kernel = late("sparton.kernels.encoder_layer.gelu.gelu_backward")


def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    return _forward_kernel()(rows_of(x), bias.contiguous()).view(x.shape)


def _gelu_gradients(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dx, dbias = _backward_kernel()(rows_of(grad), rows_of(x), bias.contiguous())
    return dx.view(x.shape), dbias.to(bias.dtype)


_operator = Operator("sparton::bias_gelu", _gelu, fake=lambda x, bias: x.new_empty(x.shape))
_operator.differentiable(("x", "bias"), _gelu_gradients)


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
