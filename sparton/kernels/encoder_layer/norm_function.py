"""Dropout, residual and normalisation as PyTorch operators: autograd, torch.compile.

T tokens, D columns.

Reached as :mod:`sparton.kernels.dispatch` says.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sparton.kernels.dispatch import needs_operators
from sparton.kernels.encoder_layer.dropout import draw_seed
from sparton.kernels.encoder_layer.operands import FLOATS, check_operands, rows_of


@functools.cache
def _kernels() -> ModuleType:
    from sparton.kernels.encoder_layer import normalization

    return normalization


def _post_norm(
    x: Tensor, bias: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, seed: Tensor | None,
    p: float, eps: float, dtype: torch.dtype, copy: torch.dtype | None, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The result, its copy, and the saved sums and moments; empty ones if not wanted."""
    vectors = (vector.contiguous() for vector in (gain, shift))
    out, second, saved = _kernels().post_norm_forward(
        rows_of(x), bias.contiguous(), rows_of(residual), *vectors, seed,
        p=p, eps=eps, dtype=dtype, copy=copy, save=save,
    )  # fmt: skip
    second = out.new_empty(0) if second is None else second.view(x.shape)
    saved = saved or (out.new_empty(0), out.new_empty(0, dtype=torch.float32))
    return out.view(x.shape), second, *saved


def _post_norm_gradients(
    grad: Tensor, copy_grad: Tensor | None, sums: Tensor, moments: Tensor, gain: Tensor,
    seed: Tensor | None, p: float, dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernels = _kernels()
    dx, dresidual, columns = kernels.post_norm_backward(
        rows_of(grad), None if copy_grad is None else rows_of(copy_grad),
        kernels.NormSums(sums, moments), gain.contiguous(), seed, p=p, dtypes=dtypes,
    )  # fmt: skip
    return dx.view(grad.shape), dresidual.view(grad.shape), columns


@torch.library.custom_op("sparton::post_norm", mutates_args=())
def _post_norm_op(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    gain: Tensor,
    shift: Tensor,
    seed: Tensor | None,
    p: float,
    eps: float,
    dtype: torch.dtype,
    copy: torch.dtype | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _post_norm(x, bias, residual, gain, shift, seed, p, eps, dtype, copy, save)


@_post_norm_op.register_fake
def _(
    x: Tensor, bias: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, seed: Tensor | None,
    p: float, eps: float, dtype: torch.dtype, copy: torch.dtype | None, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    D = x.shape[-1]
    T = x.numel() // D
    sum_dtype = torch.promote_types(x.dtype, residual.dtype) if save else dtype
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape if copy else (0,), dtype=copy or dtype),
        x.new_empty((T, D) if save else (0,), dtype=sum_dtype),
        x.new_empty((2, T) if save else (0,), dtype=torch.float32),
    )


@torch.library.custom_op("sparton::post_norm_backward", mutates_args=())
def _post_norm_backward_op(
    grad: Tensor,
    copy_grad: Tensor | None,
    sums: Tensor,
    moments: Tensor,
    gain: Tensor,
    seed: Tensor | None,
    p: float,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    dtypes = (dtype, residual_dtype)
    return _post_norm_gradients(grad, copy_grad, sums, moments, gain, seed, p, dtypes)


@_post_norm_backward_op.register_fake
def _(
    grad: Tensor, copy_grad: Tensor | None, sums: Tensor, moments: Tensor, gain: Tensor,
    seed: Tensor | None, p: float, dtype: torch.dtype, residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        grad.new_empty(grad.shape, dtype=dtype),
        grad.new_empty(grad.shape, dtype=residual_dtype),
        grad.new_empty((3, grad.shape[-1]), dtype=torch.float32),
    )


def _post_norm_setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, bias, residual, gain, shift, seed, p, *_ = inputs
    # Sums and moments have no gradient: it need not be made of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:], gain, seed)
    ctx.p, ctx.dtypes = p, (x.dtype, residual.dtype)
    ctx.vector_dtypes = bias.dtype, gain.dtype, shift.dtype


def _post_norm_backward(
    ctx: Any, grad: Tensor | None, copy_grad: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    first, second = (copy_grad, None) if grad is None else (grad, copy_grad)
    if first is None:
        return (None,) * 11
    sums, moments, gain, seed = ctx.saved_tensors
    arguments = (first, second, sums, moments, gain, seed, ctx.p)
    # The operator refuses second derivatives where someone asks for them.
    if torch.is_grad_enabled() or needs_operators():
        dx, dresidual, columns = _post_norm_backward_op(*arguments, *ctx.dtypes)
    else:
        dx, dresidual, columns = _post_norm_gradients(*arguments, ctx.dtypes)
    dbias, dgain, dshift = (
        row.to(dtype) for row, dtype in zip(columns.unbind(0), ctx.vector_dtypes, strict=True)
    )
    return dx, dbias, dresidual, dgain, dshift, *[None] * 6


_post_norm_op.register_autograd(_post_norm_backward, setup_context=_post_norm_setup)


class _PostNorm(torch.autograd.Function):
    """The operators for eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _post_norm(*inputs)
        _post_norm_setup(ctx, inputs, output)
        return output[:2]

    backward = staticmethod(_post_norm_backward)


def post_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    gain: Tensor,
    shift: Tensor,
    *,
    eps: float,
    p: float = 0.0,
    seed: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``LayerNorm(residual + dropout(x + bias))``, computed in fp32.

    Args:
        x: ``[..., D]`` float16, bfloat16 or float32 on a GPU: a linear layer's product.
        bias: ``[D]``, of that layer.
        residual: ``[..., D]``, the same shape, of any of these dtypes.
        gain, shift: ``[D]``, weight and bias of the normalisation.
        eps: added to the variance.
        p: share of the numbers that dropout sets to 0, below 1.
        seed: int32 ``[]`` that says which, see :func:`hashed_dropout`; None draws one from
            PyTorch's global generator.
        dtype: of the result; None: the wider of those of x and residual, in which they are added
            in any case.

    Returns:
        ``[..., D]``. Differentiable once, with respect to all tensors but the seed; gradients of
        vectors are summed in fp32 in a fixed order.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, p outside of [0, 1).
    """
    return _normalised(x, bias, residual, gain, shift, seed, p, eps, dtype, None)[0]


def post_norm_and_copy(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    gain: Tensor,
    shift: Tensor,
    *,
    eps: float,
    p: float = 0.0,
    seed: Tensor | None = None,
    dtype: torch.dtype | None = None,
    copy: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The result of :func:`post_norm` in two dtypes, as the next residual and as what the next
    product reads: rounded where it is made, and the gradients of both are added where they are
    read.

    Args:
        x, bias, residual, gain, shift, eps, p, seed, dtype: see :func:`post_norm`.
        copy: dtype of the second result.

    Returns:
        ``[..., D]`` in ``dtype`` and in ``copy``, both differentiable.

    Raises:
        ValueError: as :func:`post_norm`.
    """
    return _normalised(x, bias, residual, gain, shift, seed, p, eps, dtype, copy)


def _normalised(
    x: Tensor, bias: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, seed: Tensor | None,
    p: float, eps: float, dtype: torch.dtype | None, copy: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_operands(x, bias, gain, shift)
    place = (x.shape, x.device)
    if (residual.shape, residual.device) != place or residual.dtype not in FLOATS:
        raise ValueError(
            f"residual must be a float tensor {tuple(x.shape)} on {x.device} like x, got "
            f"{residual.dtype} {tuple(residual.shape)} on {residual.device}"
        )
    if seed is not None and (seed.dtype, seed.shape, seed.device) != (torch.int32, (), x.device):
        raise ValueError(
            f"seed must be int32 [] on {x.device}, got {seed.dtype} {tuple(seed.shape)} on "
            f"{seed.device}"
        )
    for name, wanted in (("dtype", dtype), ("copy", copy)):
        if wanted is not None and wanted not in FLOATS:
            raise ValueError(f"{name} must be float16, bfloat16 or float32, got {wanted}")
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")
    seed = (draw_seed(x.device) if seed is None else seed) if p else None
    dtype = torch.promote_types(x.dtype, residual.dtype) if dtype is None else dtype
    tensors = (x, bias, residual, gain, shift)
    differentiate = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    arguments = (*tensors, seed, p, eps, dtype, copy, differentiate)
    if needs_operators():
        return _post_norm_op(*arguments)[:2]
    return _PostNorm.apply(*arguments) if differentiate else _post_norm(*arguments)[:2]
