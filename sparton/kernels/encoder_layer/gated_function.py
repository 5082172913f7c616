"""GELU and SiLU of one matrix, times another, as PyTorch operators. T tokens, D columns."""

from torch import Tensor

from sparton.kernels.dispatch import late
from sparton.kernels.encoder_layer.operands import check_operands, rows_of
from sparton.kernels.operator import Operator

_kernel = late("sparton.kernels.encoder_layer.gated.gated_forward")
_backward_kernel = late("sparton.kernels.encoder_layer.gated.gated_backward")


def _gelu(x: Tensor) -> Tensor:
    return _kernel()(rows_of(x), None, "gelu").view(*x.shape[:-1], x.shape[-1] // 2)


def _gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return _backward_kernel()(rows_of(grad), rows_of(x), None, "gelu")[0].view(x.shape)


def _fake_gelu(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


_gelu_operator = Operator("sparton::gated_gelu", _gelu, fake=_fake_gelu)
_gelu_operator.differentiable(("x",), _gelu_gradient)


def _silu(u: Tensor, v: Tensor) -> Tensor:
    return _kernel()(rows_of(u), rows_of(v), "silu").view(u.shape)


def _silu_gradients(grad: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    du, dv = _backward_kernel()(rows_of(grad), rows_of(u), rows_of(v), "silu")
    return du.view(u.shape), dv.view(v.shape)


_silu_operator = Operator("sparton::gated_silu", _silu, fake=lambda u, v: u.new_empty(u.shape))
_silu_operator.differentiable(("u", "v"), _silu_gradients)


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
    return _gelu_operator(x)


def gated_silu(u: Tensor, v: Tensor) -> Tensor:
    """``silu(u) * v`` (SwiGLU; Shazeer, arXiv 2002.05202), computed in fp32. Two products are read
    where they are, so that neither they nor the weights behind them are brought together.

    Args:
        u, v: ``[..., D]`` float16, bfloat16 or float32 on a GPU: products of two linear layers.

    Returns:
        ``[..., D]`` in the dtype of u. Differentiable once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    check_operands(u)
    if (u.shape, u.dtype, u.device) != (v.shape, v.dtype, v.device):
        raise ValueError(
            f"u and v must be alike, got {u.dtype} {tuple(u.shape)} on {u.device} and {v.dtype} "
            f"{tuple(v.shape)} on {v.device}"
        )
    return _silu_operator(u, v)
