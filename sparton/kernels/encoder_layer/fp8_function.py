"""Linear layers in FP8, with what follows them, as functions of autograd.

A layer's product is in FP8, and so are the gradients of what it reads and of its weight. What
computes an operand of a product knows, or bounds, the norms of its rows, by which it is rounded: a
function therefore has the product and what follows it.

T rows, K inputs, N outputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sparton.kernels.dispatch import late, on_its_device
from sparton.kernels.encoder_layer.dropout import draw_seed
from sparton.kernels.encoder_layer.fp8_operands import (
    Fp8Operand,
    Fp8Rows,
    Limits,
    unknown_limits,
)
from sparton.kernels.encoder_layer.fp8_products import (
    Fp8Weight,
    fp8_weight_gradient,
    product_limits,
    rounded,
    scaled_product,
)
from sparton.kernels.encoder_layer.operands import NormOptions
from sparton.kernels.operator import gradient_follows

_limits_of = late("sparton.kernels.encoder_layer.fp8_limits.limits_of")
_round = late("sparton.kernels.encoder_layer.fp8_tiles.round_tiles")
_norm = late("sparton.kernels.encoder_layer.normalization.norm_forward")
_norm_backward = late("sparton.kernels.encoder_layer.normalization.norm_backward")


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
    out = _Linear.apply(x.wide.flatten(0, -2), x, layer.rounded, layer.bias, *layer.weights)
    return out.view(*x.wide.shape[:-1], -1)


@on_its_device
def fp8_linear_gelu(x: Fp8Operand, layer: Layer) -> Fp8Operand:
    """GELU of :func:`fp8_linear`, as :func:`~sparton.kernels.encoder_layer.bias_gelu` has it, to be
    read by another product, in FP8 alone."""
    turned = torch.is_grad_enabled()  # the next weight may learn where none does here
    limits = product_limits(x.limits, layer.rounded, layer.bias)
    given = (x, layer.rounded, limits, turned, layer.bias, *layer.weights)
    out, *found = _LinearGelu.apply(x.wide.flatten(0, -2), *given)
    rows, others = Fp8Rows(*found[:2]), Fp8Rows(*found[2:]) if turned else None
    return Fp8Operand(out.view(*x.wide.shape[:-1], -1), rows, others, limits)


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
    out, copy, *found = _LinearPostNorm.apply(
        *(x.wide.flatten(0, -2), x, layer.rounded, layer.bias),
        *(residual.flatten(0, -2), gain, shift, seed if options.p else None, options),
        *(save, *layer.weights),
    )
    out = out.view(residual.shape)
    wide = out if copy is None else copy.view(residual.shape)
    if not found:
        return out, None
    return out, rounded(wide, Limits(*found), turned=torch.is_grad_enabled())


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, operand: Fp8Operand, weight: Fp8Weight, bias: Tensor, *weights: Tensor
    ) -> Tensor:
        _keep(ctx, operand, weight, bias, weights)
        return scaled_product(operand.rows, weight.outputs, bias.to(x.dtype), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, _ = _kept(ctx)
        grad = grad.contiguous()
        found = _round()(grad, _limits_of()(grad), turned=kept.x is not None, sums=True)
        dx, *dweights = _gradients(ctx, kept, found.rows, found.turned)
        return dx, None, None, found.sums.to(ctx.bias_dtype), *dweights


class _LinearGelu(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, operand: Fp8Operand, weight: Fp8Weight, limits: Limits, turned: bool,
        bias: Tensor, *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        product = scaled_product(operand.rows, weight.outputs, None, x.dtype)
        if turned:
            _keep(ctx, operand, weight, bias, weights, product, bias)
        found = _round()(product, limits, bias=bias, turned=turned)
        tensors = *found.rows, *(found.turned or ())
        ctx.mark_non_differentiable(*tensors)
        # A place in the graph, of one number.
        return product.new_zeros(()).expand(product.shape), *tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * (6 + len(ctx.sizes))
        kept, (product, bias) = _kept(ctx)
        grad = grad.contiguous()
        given = {"bias": bias, "grad": grad, "turned": kept.x is not None, "sums": True}
        found = _round()(product, _limits_of()(grad), **given)
        dx, *dweights = _gradients(ctx, kept, found.rows, found.turned)
        return dx, None, None, None, None, found.sums.to(ctx.bias_dtype), *dweights


class _LinearPostNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, operand: Fp8Operand, weight: Fp8Weight, bias: Tensor, residual: Tensor,
        gain: Tensor, shift: Tensor, seed: Tensor | None, options: NormOptions, save: bool,
        *weights: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        product = scaled_product(operand.rows, weight.outputs, None, x.dtype)
        limits = unknown_limits(product) if options.limits else None
        eps, p, dtype, copy, _ = options
        out, second, *saved = _norm()(
            product, bias, residual.contiguous(), gain, shift, seed,
            eps=eps, p=p, dtype=dtype, copy=copy, save=save, limits=limits,
        )  # fmt: skip
        if save:
            _keep(ctx, operand, weight, bias, weights, *saved, gain, seed)
        ctx.p, ctx.dtypes = p, (x.dtype, residual.dtype, gain.dtype, shift.dtype)
        found = () if limits is None else limits[:2]
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
        limits = unknown_limits(sums)
        dproduct, dresidual, columns = _norm_backward()(
            grads[0], grads[1] if grads[1:] else None, None, sums, moments, gain, seed,
            vectors=3, p=ctx.p, dtypes=(x_dtype, residual_dtype), limits=limits,
        )  # fmt: skip
        dgain, dbias, dshift = columns.unbind(0)
        found = rounded(dproduct, limits, turned=kept.x is not None)
        dx, *dweights = _gradients(ctx, kept, found.rows, found.turned)
        vectors = dbias.to(ctx.bias_dtype), dresidual, dgain.to(gain_dtype), dshift.to(shift_dtype)
        return dx, None, None, *vectors, None, None, None, *dweights


class _Kept(NamedTuple):
    """What :func:`_gradients` reads.

    Attributes:
        x: ``[K, T]``, what the layer read; None where no weight learns.
        inputs: of the layer's weight.
    """

    x: Fp8Rows | None
    inputs: Fp8Rows


def _keep(
    ctx: Any,
    x: Fp8Operand,
    weight: Fp8Weight,
    bias: Tensor,
    weights: Sequence[Tensor],
    *others: Tensor | None,
) -> None:
    """Save what :func:`_gradients` reads, and others."""
    ctx.set_materialize_grads(False)
    learns = any(ctx.needs_input_grad[-len(weights) :])
    turned = x.turned if learns and x.turned is not None else (None, None)
    ctx.save_for_backward(*turned, *weight.inputs, *others)
    ctx.sizes, ctx.dtype = [each.shape[0] for each in weights], x.wide.dtype
    ctx.weight_dtypes, ctx.bias_dtype = [each.dtype for each in weights], bias.dtype


def _kept(ctx: Any) -> tuple[_Kept, list[Tensor]]:
    """What was saved, and the others. Who computes layers again lets nobody ask twice."""
    values, scales, of_inputs, their_scales, *others = ctx.saved_tensors
    x = None if values is None else Fp8Rows(values, scales)
    return _Kept(x, Fp8Rows(of_inputs, their_scales)), others


def _gradients(ctx: Any, kept: _Kept, grad: Fp8Rows, turned: Fp8Rows | None) -> list[Tensor | None]:
    """Gradients of what the layer reads and of each of its weights, given that of its product."""
    needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[-len(ctx.sizes) :]
    dx = scaled_product(grad, kept.inputs, None, ctx.dtype) if needs_x else None
    if kept.x is None or turned is None:
        return [dx, *(None for _ in needs_weights)]
    dweight = fp8_weight_gradient(turned, kept.x, ctx.weight_dtypes[0])
    parts = zip(dweight.split(ctx.sizes), ctx.weight_dtypes, needs_weights, strict=True)
    return [dx, *(part.to(dtype) if needed else None for part, dtype, needed in parts)]
