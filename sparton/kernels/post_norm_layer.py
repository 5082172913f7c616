"""A whole layer of BERT's kind as one function of autograd.

Its parts are those of :mod:`~sparton.kernels.encoder_layer` and
:mod:`~sparton.kernels.varlen_attention` with matrix products between them. As functions and modules
of their own they take the host several times as long as their launches do, for which the device
waits where a batch is small, as in a step of many parts or in a small model. Products are in 16
bits, or all of them in FP8, see :mod:`~sparton.kernels.encoder_layer.fp8_function`.

T packed tokens, D hidden width, F width of the feed-forward part, H heads, d the width of a head.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sparton.kernels.dispatch import late, on_its_device, without_autocast
from sparton.kernels.encoder_layer.dropout import draw_seed
from sparton.kernels.encoder_layer.fp8_operands import (
    Fp8Operand,
    Fp8Rows,
    Limits,
    unknown_limits,
)
from sparton.kernels.encoder_layer.fp8_products import (
    Fp8Weight,
    attention_limits,
    fp8_weight_gradient,
    gelu_gradient_limits,
    product_limits,
    rounded,
    scaled_product,
)
from sparton.kernels.encoder_layer.linear import (
    linear,
    linear_gelu,
    linear_gelu_and_product,
    weight_gradient,
)
from sparton.kernels.encoder_layer.operands import Normalised, NormOptions
from sparton.kernels.operator import gradient_follows
from sparton.kernels.varlen_attention.operands import AttentionOperands

_attend = late("sparton.kernels.varlen_attention.forward.varlen_attention_forward")
_attend_backward = late("sparton.kernels.varlen_attention.backward.varlen_attention_backward")
_gelu_backward = late("sparton.kernels.encoder_layer.gelu.gelu_backward")
_norm = late("sparton.kernels.encoder_layer.normalization.norm_forward")
_norm_backward = late("sparton.kernels.encoder_layer.normalization.norm_backward")
_round = late("sparton.kernels.encoder_layer.fp8_tiles.round_tiles")

Saved = tuple[Tensor | None, ...]
Operand = Tensor | Fp8Operand  # what a product reads, [T, K]
Weight = Tensor | Fp8Weight


class LayerParameters(NamedTuple):
    """What a layer learns, named as in transformers; any float dtype."""

    query_weight: Tensor
    key_weight: Tensor
    value_weight: Tensor
    query_bias: Tensor
    key_bias: Tensor
    value_bias: Tensor
    attention_weight: Tensor
    attention_bias: Tensor
    attention_gain: Tensor
    attention_shift: Tensor
    intermediate_weight: Tensor
    intermediate_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor
    output_gain: Tensor
    output_shift: Tensor


class ProductWeights(NamedTuple):
    """What the products read of them: the matrices in the dtype of the products, or all four in
    FP8, and the biases.

    Attributes:
        projection: ``[3 D, D]``, weights of queries, keys and values one above the other.
        projection_bias: ``[3 D]``.
        attention: ``[D, D]``.
        intermediate: ``[F, D]``.
        output: ``[D, F]``.
        intermediate_bias: ``[F]``; where it is given, passes without a graph leave bias and GELU to
            the product, see :func:`~sparton.kernels.encoder_layer.linear.linear_gelu`.
    """

    projection: Weight
    projection_bias: Tensor
    attention: Weight
    intermediate: Weight
    output: Weight
    intermediate_bias: Tensor | None = None

    @property
    def in_fp8(self) -> bool:
        return isinstance(self.projection, Fp8Weight)


class LayerOptions(NamedTuple):
    """
    Attributes:
        cu_seqlens: int32 ``[N + 1]``, boundaries of the sequences.
        max_seqlen: upper bound of their tokens.
        heads: H.
        scale: factor of the scores.
        attention, output: of the two normalisations.
        owned: nobody else has the residual, so that it may be written over where nothing is
            learned.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    heads: int
    scale: float
    attention: NormOptions
    output: NormOptions
    owned: bool = False

    def operands(self, states: Tensor) -> AttentionOperands:
        """What attention reads of queries, keys and values ``states [T, 3 D]``."""
        query, key, value = states.view(len(states), 3, self.heads, -1).unbind(1)
        bounds, longest = (self.cu_seqlens,) * 2, (self.max_seqlen,) * 2
        return AttentionOperands(query, key, value, *bounds, *longest, self.scale)


class _Attended(NamedTuple):
    """What the backward of the attention half reads; ``operand`` is that of the layer and ``read``
    that of its second product, as :func:`_kept` has them."""

    operand: Tensor | None
    operand_scales: Tensor | None
    states: Tensor
    mixed: Tensor
    read: Tensor | None
    read_scales: Tensor | None
    lse: Tensor | None
    sums: Tensor | None
    moments: Tensor | None
    seed: Tensor | None


class _Fed(NamedTuple):
    """What the backward of the feed-forward half reads: ``product`` comes before GELU and ``read``
    behind it."""

    operand: Tensor | None
    operand_scales: Tensor | None
    product: Tensor | None
    read: Tensor | None
    read_scales: Tensor | None
    sums: Tensor | None
    moments: Tensor | None
    seed: Tensor | None


class _Ended(NamedTuple):
    """The end of a half: what it hands on, the limits of its rows if they are wanted, and the seed
    of its dropout."""

    norm: Normalised
    limits: Limits | None
    seed: Tensor | None

    @property
    def wide(self) -> Tensor:
        """What the next product reads."""
        return self.norm.out if self.norm.second is None else self.norm.second


@on_its_device
def post_norm_layer(
    operand: Operand,
    residual: Tensor,
    parameters: LayerParameters,
    weights: ProductWeights,
    options: LayerOptions,
) -> tuple[Tensor, Tensor | None, Limits | None]:
    """Attention and the feed-forward part with GELU, each added to what it read, after dropout, and
    normalised.

    Args:
        operand: ``[T, D]`` float16 or bfloat16, contiguous, on a GPU; in FP8 if the products are.
            T is not 0, and d is one that
            :func:`~sparton.kernels.varlen_attention.varlen_self_attention` serves.
        residual: ``[T, D]``, contiguous, the same in the dtype of sums.
        parameters: those that gradients are for.
        weights: the same in the dtype of the operand. No gradient flows through them: it goes to
            the parameters themselves, and in fp32 to those in fp32.

    Returns:
        What the layer hands on, ``[T, D]``, and its copy or None, see
        :func:`~sparton.kernels.encoder_layer.post_norm_and_copy`; and the limits of its rows, if
        the options ask for them, with a copy then that may be the same in memory: the gradients of
        both are added where they are read. Differentiable once.
    """
    in_fp8, wide = (operand, operand.wide) if isinstance(operand, Fp8Operand) else (None, operand)
    if gradient_follows(wide, residual, *parameters):
        out, copy, *found = _Layer.apply(in_fp8, weights, options, wide, residual, *parameters)
        return out, copy, Limits(*found) if found else None
    ended, _ = _forward(operand, residual, parameters, weights, options, save=False)
    return ended.norm.out, ended.norm.second, ended.limits


class _Layer(Function):
    @staticmethod
    def forward(
        ctx: Any, in_fp8: Fp8Operand | None, weights: ProductWeights, options: LayerOptions,
        operand: Tensor, residual: Tensor, *parameters: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        learned = LayerParameters(*parameters)
        read = operand if in_fp8 is None else in_fp8
        ended, saved = _forward(read, residual, learned, weights, options, save=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, *parameters)
        # Weights as products read them are nobody's to change: others come in their place.
        ctx.weights, ctx.options, ctx.residual_dtype = weights, options, residual.dtype
        ctx.same = operand is residual
        out, copy, *_ = ended.norm
        if ended.limits is None:
            return out, copy
        # Products in FP8 do not end in a sum, as those in 16 bits do.
        copy = out.detach() if copy is None else copy
        found = ended.limits[:2]
        ctx.mark_non_differentiable(*found)
        return out, copy, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = [grad.contiguous() for grad in grads[:2] if grad is not None]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        saved = iter(ctx.saved_tensors)
        attended, fed = _take(_Attended, saved), _take(_Fed, saved)
        parameters = _take(LayerParameters, saved)
        needs = LayerParameters(*ctx.needs_input_grad[-len(parameters) :])
        layer = _Backward(parameters, ctx.weights, ctx.options, needs)
        with without_autocast(given[0].device):
            middle, narrow, of_output = layer.feed_forward(given, fed)
            operand, residual, of_attention = layer.attention(
                [middle, narrow], attended, ctx.residual_dtype, same=ctx.same
            )
        return None, None, None, operand, residual, *of_attention, *of_output


def _take(kind: Any, tensors: Iterator[Tensor]) -> Any:
    return kind(*islice(tensors, len(kind._fields)))


def _forward(
    operand: Operand, residual: Tensor, parameters: LayerParameters, weights: ProductWeights,
    options: LayerOptions, *, save: bool,
) -> tuple[_Ended, Saved]:  # fmt: skip
    """The result, and what the backward reads if ``save``: :class:`_Attended` and :class:`_Fed`."""
    with without_autocast(residual.device):
        middle, attended = _attention_half(
            operand, residual, parameters, weights, options, save=save
        )
        out, fed = _feed_forward_half(middle, parameters, weights, options.output, save=save)
    return out, (*attended, *fed)


def _attention_half(
    operand: Operand, residual: Tensor, parameters: LayerParameters, weights: ProductWeights,
    options: LayerOptions, *, save: bool,
) -> tuple[_Ended, Saved]:  # fmt: skip
    states = _product(operand, weights.projection, weights.projection_bias)
    mixed, lse = _attend()(options.operands(states), lse=save)
    mixed = mixed.view(residual.shape)
    read: Operand = mixed
    if isinstance(operand, Fp8Operand):
        assert isinstance(weights.projection, Fp8Weight)
        limits = attention_limits(operand.limits, weights.projection, weights.projection_bias)
        read = rounded(mixed, limits, turned=save)
    vectors = parameters.attention_bias, parameters.attention_gain, parameters.attention_shift
    owned = options.owned and weights.intermediate_bias is not None
    norm = options.attention._replace(limits=weights.in_fp8)
    ended = _end(read, weights.attention, residual, vectors, norm, save=save, owned=owned)
    if not save:
        return ended, ()
    # What is not returned is free for the other half.
    out, seed = ended.norm, ended.seed
    kept = *_kept(operand), states, mixed, *_kept(read), lse, out.sums, out.moments, seed
    return ended, _Attended(*kept)


def _feed_forward_half(
    middle: _Ended, parameters: LayerParameters, weights: ProductWeights,
    options: NormOptions, *, save: bool,
) -> tuple[_Ended, Saved]:  # fmt: skip
    operand = rounded(middle.wide, middle.limits, turned=save) if weights.in_fp8 else middle.wide
    read, product = _activated(operand, parameters, weights, save=save)
    vectors = parameters.output_bias, parameters.output_gain, parameters.output_shift
    owned = weights.intermediate_bias is not None
    options = options._replace(limits=options.limits and weights.in_fp8)
    ended = _end(read, weights.output, middle.norm.out, vectors, options, save=save, owned=owned)
    if not save:
        return ended, ()
    out, seed = ended.norm, ended.seed
    kept = *_kept(operand), product, *_kept(read), out.sums, out.moments, seed
    return ended, _Fed(*kept)


def _kept(operand: Operand) -> tuple[Tensor | None, Tensor | None]:
    """What the gradient of a weight reads, and its scales in FP8."""
    if isinstance(operand, Fp8Operand):
        return operand.turned or (None, None)
    return operand, None


def _activated(
    operand: Operand, parameters: LayerParameters, weights: ProductWeights, *, save: bool
) -> tuple[Operand, Tensor | None]:
    """GELU of the product with its bias; and the product, if the backward reads it."""
    weight, bias = weights.intermediate, parameters.intermediate_bias
    if isinstance(operand, Fp8Operand):
        assert isinstance(weight, Fp8Weight)
        product = _product(operand, weight, None)
        limits = product_limits(operand.limits, weight, bias)
        rows, turned, _ = _round()(product, limits, bias=bias, turned=save)
        return Fp8Operand(product, rows, turned, limits), product
    assert isinstance(weight, Tensor)
    if save or weights.intermediate_bias is None:
        return linear_gelu_and_product(operand, weight, bias)
    return linear_gelu(operand, weight, weights.intermediate_bias), None


def _end(
    x: Operand, weight: Weight, residual: Tensor, vectors: tuple[Tensor, Tensor, Tensor],
    options: NormOptions, *, save: bool, owned: bool,
) -> _Ended:  # fmt: skip
    """The end of a half, given bias, gain and shift. Where nobody else has the residual (``owned``)
    and no backward reads it, a product in 16 bits is added to it where it lies, and the
    normalisation reads a tensor less."""
    bias, gain, shift = vectors
    seed = draw_seed(residual.device) if options.p else None
    added: Tensor | None = residual
    alone = owned and not save and not options.p
    if alone and isinstance(x, Tensor) and residual.dtype == x.dtype:
        assert isinstance(weight, Tensor)
        product, added = residual.addmm_(x, weight.t()), None
    else:
        product = _product(x, weight, None)
    limits = unknown_limits(product) if options.limits else None
    out = _norm()(
        product, bias, added, gain, shift, seed, p=options.p, eps=options.eps,
        dtype=options.dtype, copy=options.copy, save=save, limits=limits,
    )  # fmt: skip
    return _Ended(out, limits, seed)


def _product(x: Operand, weight: Weight, bias: Tensor | None) -> Tensor:
    """``x weight^T + bias``."""
    if isinstance(x, Fp8Operand):
        assert isinstance(weight, Fp8Weight)
        return scaled_product(x.rows, weight.outputs, bias, x.wide.dtype)
    assert isinstance(weight, Tensor)
    return torch.mm(x, weight.t()) if bias is None else linear(x, weight, bias)


def _input_gradient(grad: Operand, weight: Weight) -> Tensor:
    """``grad weight``."""
    if isinstance(grad, Fp8Operand):
        assert isinstance(weight, Fp8Weight)
        return scaled_product(grad.rows, weight.inputs, None, grad.wide.dtype)
    assert isinstance(weight, Tensor)
    return torch.mm(grad, weight)


class _Backward(NamedTuple):
    """The way back through both halves; ``needs`` says which parameters have gradients."""

    parameters: LayerParameters
    weights: ProductWeights
    options: LayerOptions
    needs: LayerParameters

    def feed_forward(
        self, grads: list[Tensor], fed: _Fed
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Gradients of the half's residual, of its operand, and of its parameters in their order,
        given those of its result and of the copy."""
        assert fed.product is not None
        dproduct, dmiddle, (dgain, dbias, dshift) = self._norm(
            grads,
            fed,
            self.parameters.output_gain,
            self.options.output,
            (fed.product.dtype, self.options.attention.dtype),
        )
        doutput = self._of_weights(dproduct, fed.read, fed.read_scales, "output_weight")
        dactivated = _input_gradient(dproduct, self.weights.output)
        dinner, dinner_bias = self._gelu(dactivated, dproduct, fed.product)
        dintermediate = self._of_weights(
            dinner, fed.operand, fed.operand_scales, "intermediate_weight"
        )
        doperand = _input_gradient(dinner, self.weights.intermediate)
        return dmiddle, doperand, [dintermediate, dinner_bias, doutput, dbias, dgain, dshift]

    def attention(
        self,
        grads: list[Tensor],
        attended: _Attended,
        residual_dtype: torch.dtype,
        *,
        same: bool,
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """The same of the half before. Where one tensor is its operand and residual, a product in
        16 bits ends in the sum of both gradients, which is otherwise a pass of its own."""
        dproduct, dresidual, (dgain, dbias, dshift) = self._norm(
            grads,
            attended,
            self.parameters.attention_gain,
            self.options.attention,
            (attended.states.dtype, residual_dtype),
        )
        dattention = self._of_weights(
            dproduct, attended.read, attended.read_scales, "attention_weight"
        )
        operands = self.options.operands(attended.states)
        shape = operands.query.shape
        dmixed = _input_gradient(dproduct, self.weights.attention).view(shape)
        wide, weight = torch.empty_like(attended.states), self.weights.projection
        norms = None
        if isinstance(weight, Fp8Weight):  # of each head's part of the queries, keys and values
            norms = wide.new_empty((3, *reversed(shape[:2])), dtype=torch.float32)
        _attend_backward()(
            dmixed, operands, attended.mixed.view(shape), attended.lse,
            gradients=self.options.operands(wide)[:3], norms=norms,
        )  # fmt: skip
        dstates: Operand = wide
        if isinstance(weight, Fp8Weight):
            assert norms is not None
            of_rows = torch.linalg.vector_norm(norms.flatten(0, 1), dim=0)
            limits = Limits(of_rows, of_rows.amax())
            rows, turned, dbiases = _round()(wide, limits, turned=True, sums=True)
            dstates = Fp8Operand(wide, rows, turned, limits)
            doperand = _input_gradient(dstates, weight)
            doperand = dresidual.add_(doperand) if same else doperand
        else:
            dbiases = wide.sum(0, dtype=torch.float32)
            doperand = dresidual.addmm_(wide, weight) if same else torch.mm(wide, weight)
        dprojection = self._of_weights(
            dstates, attended.operand, attended.operand_scales, *LayerParameters._fields[:3]
        )
        dweights = [None] * 3 if dprojection is None else dprojection.chunk(3)
        of_residual = None if same else dresidual
        of_projection = [*dweights, *dbiases.chunk(3)]
        return doperand, of_residual, [*of_projection, dattention, dbias, dgain, dshift]

    def _norm(
        self,
        grads: list[Tensor],
        saved: _Attended | _Fed,
        gain: Tensor,
        options: NormOptions,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> tuple[Operand, Tensor, Sequence[Tensor]]:
        """Gradients of the product and of the residual, in these dtypes, and of gain, bias and
        shift."""
        limits = unknown_limits(grads[0]) if self.weights.in_fp8 else None
        dproduct, dresidual, columns = _norm_backward()(
            grads[0], grads[1] if grads[1:] else None, None, saved.sums, saved.moments, gain,
            saved.seed, vectors=3, p=options.p, dtypes=dtypes, limits=limits,
        )  # fmt: skip
        grad = dproduct if limits is None else rounded(dproduct, limits, turned=True)
        return grad, dresidual, columns.unbind(0)

    def _gelu(self, grad: Tensor, of_product: Operand, product: Tensor) -> tuple[Operand, Tensor]:
        """Gradients of the product before GELU and of its bias, given those of GELU's result and of
        the product of that."""
        bias = self.parameters.intermediate_bias
        if not isinstance(of_product, Fp8Operand):
            return _gelu_backward()(grad, product, bias)
        assert isinstance(self.weights.output, Fp8Weight)
        limits = gelu_gradient_limits(of_product.limits, self.weights.output)
        rows, turned, sums = _round()(product, limits, bias=bias, grad=grad, turned=True, sums=True)
        return Fp8Operand(grad, rows, turned, limits), sums

    def _of_weights(
        self, grad: Operand, x: Tensor | None, scales: Tensor | None, *names: str
    ) -> Tensor | None:
        """The gradient of one weight or of several, one above the other; None where none of them
        needs it."""
        if not any(getattr(self.needs, name) for name in names):
            return None
        dtype = getattr(self.parameters, names[0]).dtype
        assert x is not None
        if isinstance(grad, Fp8Operand):
            assert grad.turned is not None and scales is not None
            return fp8_weight_gradient(grad.turned, Fp8Rows(x, scales), dtype)
        return weight_gradient(grad, x, dtype)
