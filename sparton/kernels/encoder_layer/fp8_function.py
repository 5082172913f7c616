"""Linear layers in FP8, with what follows them, as functions of autograd.

A layer's product and the gradient of what it reads are FP8. The gradient of its weight is a product
over rows, which have a scale each, and stays in 16 bits. What computes an operand of a product
rounds it too, forwards and backwards: a function therefore has the product and what follows it.

T rows, K inputs, N outputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sparton.kernels.dispatch import late, on_its_device, without_autocast
from sparton.kernels.encoder_layer.dropout import draw_seed
from sparton.kernels.encoder_layer.fp8_operands import Fp8Operand, Fp8Rows, empty_rows
from sparton.kernels.encoder_layer.fp8_products import (
    Fp8Weight,
    input_gradient,
    linear_product,
)
from sparton.kernels.encoder_layer.linear import weight_gradient
from sparton.kernels.encoder_layer.operands import NormOptions
from sparton.kernels.operator import gradient_follows

_gelu = late("sparton.kernels.encoder_layer.gelu_rows.gelu_rows_forward")
_gelu_backward = late("sparton.kernels.encoder_layer.gelu_rows.gelu_rows_backward")
_norm = late("sparton.kernels.encoder_layer.normalization.norm_forward")
_norm_backward = late("sparton.kernels.encoder_layer.normalization.norm_backward")
_round_and_add = late("sparton.kernels.encoder_layer.fp8_rows.round_and_add_rows")


class Layer(NamedTuple):
    """The weights of a linear layer.

    Attributes:
        weights: ``[N_i, K]`` of any float dtype, one above the other.
        bias: ``[N]``, of any float dtype.
        rounded: the weights in FP8.
    """

    weights: Sequence[Tensor]
    bias: Tensor
    rounded: Fp8Weight


@on_its_device
def fp8_linear(x: Fp8Operand, layer: Layer) -> Tensor:
    """``x @ weight.T + bias``, ``[..., N]`` in the dtype of x.

    Args:
        x: ``[..., K]`` float16 or bfloat16.
        layer: K and N are multiples of 16.
    """
    out = _Linear.apply(x.wide.flatten(0, -2), x.rows, layer.rounded, layer.bias, *layer.weights)
    return out.view(*x.wide.shape[:-1], -1)


@on_its_device
def fp8_linear_gelu(x: Fp8Operand, layer: Layer) -> Fp8Operand:
    """GELU of :func:`fp8_linear`, as :func:`~sparton.kernels.encoder_layer.bias_gelu` has it, to be
    read by another product: in FP8 alone where nothing is recorded for gradients, the rest being on
    the meta device."""
    save = torch.is_grad_enabled()  # the weight of the next product may learn where none does here
    given = (x.rows, layer.rounded, layer.bias, save, *layer.weights)
    out, *rows = _LinearGelu.apply(x.wide.flatten(0, -2), *given)
    return Fp8Operand(out.view(*x.wide.shape[:-1], -1), Fp8Rows(*rows))


@on_its_device
def fp8_linear_post_norm(
    x: Fp8Operand,
    layer: Layer,
    residual: Tensor,
    gain: Tensor,
    shift: Tensor,
    options: NormOptions,
    *,
    seed: Tensor | None = None,
) -> tuple[Tensor, Fp8Operand | None]:
    """``LayerNorm(residual + dropout(fp8_linear(x)))``, and the same to be read by a product, or
    None; see :func:`~sparton.kernels.encoder_layer.post_norm_and_copy`.

    Args:
        residual: ``[..., N]``.
        gain, shift: ``[N]``.
        seed: of the dropout; None draws one.
    """
    if options.p and seed is None:
        seed = draw_seed(residual.device)
    save = gradient_follows(x.wide, residual, gain, shift, layer.bias, *layer.weights)
    out, copy, *rows = _LinearPostNorm.apply(
        *(x.wide.flatten(0, -2), x.rows, layer.rounded, layer.bias),
        *(residual.flatten(0, -2), gain, shift, seed if options.p else None, options),
        *(save, *layer.weights),
    )
    out = out.view(residual.shape)
    wide = out if copy is None else copy.view(residual.shape)
    return out, Fp8Operand(wide, Fp8Rows(*rows)) if rows else None


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Fp8Rows, rounded: Fp8Weight, bias: Tensor, *weights: Tensor
    ) -> Tensor:
        _keep(ctx, x, rounded, bias, weights)
        narrow = bias.to(x.dtype)
        return linear_product(rows, rounded, narrow, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, _ = _kept(ctx)
        grad = grad.contiguous()
        rows = empty_rows(grad)
        dbias = _round_and_add()(grad, rows)
        dx, *dweights = _gradients(ctx, kept, Fp8Operand(grad, rows))
        return dx, None, None, dbias.to(ctx.bias_dtype), *dweights


class _LinearGelu(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Fp8Rows, rounded: Fp8Weight, bias: Tensor, save: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        product = linear_product(rows, rounded, None, x.dtype)
        if save:
            _keep(ctx, x, rounded, bias, weights, product, bias)
        found = empty_rows(product)
        out = _gelu()(product, bias, found, save=save)
        ctx.mark_non_differentiable(*found)
        return out, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * (5 + len(ctx.sizes))
        kept, (product, bias) = _kept(ctx)
        rows = empty_rows(product)
        dproduct, dbias = _gelu_backward()(grad.contiguous(), product, bias, rows)
        dx, *dweights = _gradients(ctx, kept, Fp8Operand(dproduct, rows))
        return dx, None, None, dbias.to(ctx.bias_dtype), None, *dweights


class _LinearPostNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Fp8Rows, rounded: Fp8Weight, bias: Tensor, residual: Tensor,
        gain: Tensor, shift: Tensor, seed: Tensor | None, options: NormOptions, save: bool,
        *weights: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        product = linear_product(rows, rounded, None, x.dtype)
        found = empty_rows(product) if options.rounds else None
        eps, p, dtype, copy, _ = options
        out, second, *saved = _norm()(
            product, bias, residual.contiguous(), gain, shift, seed,
            eps=eps, p=p, dtype=dtype, copy=copy, save=save, rows=found,
        )  # fmt: skip
        if save:
            _keep(ctx, x, rounded, bias, weights, *saved, gain, seed)
        ctx.p, ctx.dtypes = p, (x.dtype, residual.dtype, gain.dtype, shift.dtype)
        if found is None:
            return out, second
        ctx.mark_non_differentiable(*found)
        return out, second, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *out_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = [grad.contiguous() for grad in out_grads[:2] if grad is not None]
        if not grads:
            return (None,) * (10 + len(ctx.sizes))
        kept, (sums, moments, gain, seed) = _kept(ctx)
        x_dtype, residual_dtype, gain_dtype, shift_dtype = ctx.dtypes
        rows = empty_rows(sums)
        dproduct, dresidual, columns = _norm_backward()(
            grads[0], grads[1] if grads[1:] else None, None, sums, moments, gain, seed,
            vectors=3, p=ctx.p, dtypes=(x_dtype, residual_dtype), rows=rows,
        )  # fmt: skip
        dgain, dbias, dshift = columns.unbind(0)
        dx, *dweights = _gradients(ctx, kept, Fp8Operand(dproduct, rows))
        vectors = dbias.to(ctx.bias_dtype), dresidual, dgain.to(gain_dtype), dshift.to(shift_dtype)
        return dx, None, None, *vectors, None, None, None, *dweights


class _Kept(NamedTuple):
    """What :func:`_gradients` reads.

    Attributes:
        x: ``[T, K]`` in 16 bits.
        inputs: of the layer's weight in FP8.
    """

    x: Tensor
    inputs: Fp8Rows


def _keep(
    ctx: Any,
    x: Tensor,
    rounded: Fp8Weight,
    bias: Tensor,
    weights: Sequence[Tensor],
    *others: Tensor | None,
) -> None:
    """Save what :func:`_gradients` reads, and others."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *rounded.inputs, *others)
    ctx.sizes = [weight.shape[0] for weight in weights]
    ctx.weight_dtypes, ctx.bias_dtype = [weight.dtype for weight in weights], bias.dtype


def _kept(ctx: Any) -> tuple[_Kept, list[Tensor]]:
    """What was saved, and the others. Who computes layers again lets nobody ask twice."""
    x, values, scales, *others = ctx.saved_tensors
    return _Kept(x, Fp8Rows(values, scales)), others


def _gradients(ctx: Any, kept: _Kept, grad: Fp8Operand) -> list[Tensor | None]:
    """Gradients of what the layer reads and of each of its weights, given that of its product."""
    x, inputs = kept
    needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[-len(ctx.sizes) :]
    dx = dweight = None
    if needs_x:
        dx = input_gradient(grad.rows, inputs, x.dtype)
    if any(needs_weights):
        with without_autocast(x.device):
            dweight = weight_gradient(grad.wide, x, ctx.weight_dtypes[0])
    if dweight is None:
        return [dx, *(None for _ in needs_weights)]
    parts = zip(dweight.split(ctx.sizes), ctx.weight_dtypes, needs_weights, strict=True)
    return [dx, *(part.to(dtype) if needed else None for part, dtype, needed in parts)]
