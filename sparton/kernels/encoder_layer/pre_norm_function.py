"""Residual and normalisation of layers that begin with their norm, as a PyTorch operator.

T tokens, D columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.dispatch import late
from sparton.kernels.encoder_layer.operands import FLOATS, check_operands, check_residual, rows_of
from sparton.kernels.operator import Operator

_forward_kernel = late("sparton.kernels.encoder_layer.normalization.norm_forward")
_backward_kernel = late("sparton.kernels.encoder_layer.normalization.norm_backward")


class Summed(NamedTuple):
    """The sum and its norm ``[..., D]``, and of each row what the backward reads, as in
    :class:`~sparton.kernels.encoder_layer.operands.Normalised`."""

    sums: Tensor
    out: Tensor
    moments: Tensor


def _pre_norm(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float, dtype: torch.dtype, centred: bool
) -> Summed:
    out, _, sums, moments = _forward_kernel()(
        rows_of(x), None, rows_of(residual), gain.contiguous(), None, None,
        p=0.0, eps=eps, dtype=dtype, copy=None, save=True, centred=centred,
    )  # fmt: skip
    return Summed(sums.view(x.shape), out.view(x.shape), moments)


def _fake(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float, dtype: torch.dtype, centred: bool
) -> Summed:
    return Summed(
        x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype)),
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((1 + centred, x.numel() // x.shape[-1]), dtype=torch.float32),
    )


def _gradients(
    sums_grad: Tensor | None, out_grad: Tensor | None, sums: Tensor, moments: Tensor, gain: Tensor,
    x_dtype: torch.dtype, residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, residual and gain."""
    out_grad = torch.zeros_like(sums) if out_grad is None else out_grad
    dx, dresidual, (dgain,) = _backward_kernel()(
        rows_of(out_grad), None, None if sums_grad is None else rows_of(sums_grad), rows_of(sums),
        moments, gain.contiguous(), None, vectors=1, p=0.0, dtypes=(x_dtype, residual_dtype),
    )  # fmt: skip
    return dx.view(sums.shape), dresidual.view(sums.shape), dgain.to(gain.dtype)


def _fake_gradients(
    sums_grad: Tensor | None, out_grad: Tensor | None, sums: Tensor, moments: Tensor, gain: Tensor,
    x_dtype: torch.dtype, residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dresidual = (sums.new_empty(sums.shape, dtype=x) for x in (x_dtype, residual_dtype))
    return dx, dresidual, gain.new_empty(gain.shape)


_operator = Operator("sparton::pre_norm", _pre_norm, fake=_fake)
_operator.differentiable(
    ("x", "residual", "gain"), _gradients, results=Summed._fields, fake=_fake_gradients
)


class Normed(NamedTuple):
    """The norm ``[..., D]``, and moments as in :class:`Summed`."""

    out: Tensor
    moments: Tensor


def _norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype, centred: bool) -> Normed:
    out, _, _, moments = _forward_kernel()(
        rows_of(x), None, None, gain.contiguous(), None, None,
        p=0.0, eps=eps, dtype=dtype, copy=None, save=True, centred=centred,
    )  # fmt: skip
    return Normed(out.view(x.shape), moments)


def _fake_norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype, centred: bool) -> Normed:
    moments = x.new_empty((1 + centred, x.numel() // x.shape[-1]), dtype=torch.float32)
    return Normed(x.new_empty(x.shape, dtype=dtype), moments)


def _norm_gradients(
    grad: Tensor, x: Tensor, moments: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor]:
    dx, _, (dgain,) = _backward_kernel()(
        rows_of(grad), None, None, rows_of(x), moments, gain.contiguous(), None,
        vectors=1, p=0.0, dtypes=(x.dtype, None),
    )  # fmt: skip
    return dx.view(x.shape), dgain.to(gain.dtype)


_norm_operator = Operator("sparton::norm", _norm, fake=_fake_norm)
_norm_operator.differentiable(("x", "gain"), _norm_gradients, results=Normed._fields)


def pre_norm(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    *,
    eps: float,
    dtype: torch.dtype | None = None,
    centred: bool = True,
) -> tuple[Tensor, Tensor]:
    """``residual + x``, and its LayerNorm without a shift, or its RMSNorm, computed in fp32: what
    the residual stream becomes, and what the next product reads. The gradients of both are added
    where they are read.

    Args:
        x: ``[..., D]`` float16, bfloat16 or float32 on a GPU: a linear layer's product.
        residual: ``[..., D]``, the same shape, of any of these dtypes; None: x is the sum.
        gain: ``[D]``, weight of the normalisation.
        eps: added to the variance, or to the mean square.
        dtype: of the norm; None: that of the sum.
        centred: LayerNorm, else RMSNorm, which does not subtract the mean.

    Returns:
        The sum ``[..., D]`` in the wider dtype of x and residual, and the norm in ``dtype``.
        Differentiable once; the gain's gradient is summed in fp32 in a fixed order.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    check_operands(x, gain)
    if residual is not None:
        check_residual(x, residual)
    if dtype is None:
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
    if residual is None:
        return x, _norm_operator(x, gain, eps, dtype, centred)
    return _operator(x, residual, gain, eps, dtype, centred)
