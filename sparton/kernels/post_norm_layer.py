"""A whole layer of BERT's kind as one function of autograd.

Its parts are those of :mod:`~sparton.kernels.encoder_layer` and
:mod:`~sparton.kernels.varlen_attention` with matrix products between them. As functions and modules
of their own they take the host several times as long as their launches do, for which the device
waits where a batch is small, as in a step of many parts or in a small model. Products are in 16
bits; or in FP8, but for those that give the gradients of weights, see
:mod:`~sparton.kernels.encoder_layer.fp8_function`.

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
from sparton.kernels.encoder_layer.fp8_operands import Fp8Rows, empty_rows
from sparton.kernels.encoder_layer.fp8_products import (
    Fp8Weight,
    input_gradient,
    linear_product,
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
_gelu_rows = late("sparton.kernels.encoder_layer.gelu_rows.gelu_rows_forward")
_gelu_rows_backward = late("sparton.kernels.encoder_layer.gelu_rows.gelu_rows_backward")
_norm = late("sparton.kernels.encoder_layer.normalization.norm_forward")
_norm_backward = late("sparton.kernels.encoder_layer.normalization.norm_backward")
_round = late("sparton.kernels.encoder_layer.fp8_rows.round_rows")
_round_and_add = late("sparton.kernels.encoder_layer.fp8_rows.round_and_add_rows")

Saved = tuple[Tensor | None, ...]
Weight = Tensor | Fp8Weight


class Operand(NamedTuple):
    """What a product reads.

    Attributes:
        wide: ``[T, K]`` in 16 bits.
        rows: the same in FP8, for a product in it.
    """

    wide: Tensor
    rows: Fp8Rows | None


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
    """What the backward of the attention half reads; ``operand`` is that of the layer."""

    operand: Tensor
    states: Tensor
    mixed: Tensor
    lse: Tensor | None
    sums: Tensor | None
    moments: Tensor | None
    seed: Tensor | None


class _Fed(NamedTuple):
    """What the backward of the feed-forward half reads: ``product`` comes before GELU and
    ``activated`` behind it."""

    operand: Tensor
    product: Tensor | None
    activated: Tensor
    sums: Tensor | None
    moments: Tensor | None
    seed: Tensor | None


class _Ended(NamedTuple):
    """The end of a half, as the next product reads it, too; and the seed of its dropout."""

    norm: Normalised
    operand: Operand
    seed: Tensor | None


@on_its_device
def post_norm_layer(
    operand: Operand,
    residual: Tensor,
    parameters: LayerParameters,
    weights: ProductWeights,
    options: LayerOptions,
) -> tuple[Tensor, Tensor | None, Fp8Rows | None]:
    """Attention and the feed-forward part with GELU, each added to what it read, after dropout, and
    normalised.

    Args:
        operand: ``[T, D]`` float16 or bfloat16, contiguous, on a GPU; in FP8, too, if the products
            are. T is not 0, and d is one that
            :func:`~sparton.kernels.varlen_attention.varlen_self_attention` serves.
        residual: ``[T, D]``, contiguous, the same in the dtype of sums.
        parameters: those that gradients are for.
        weights: the same in the dtype of the operand. No gradient flows through them: it goes to
            the parameters themselves, and in fp32 to those in fp32.

    Returns:
        What the layer hands on, ``[T, D]``, and its copy or None, see
        :func:`~sparton.kernels.encoder_layer.post_norm_and_copy`; and the same in FP8, if the
        products are in it and the options say so. Differentiable once.
    """
    given = (operand.wide, residual, *parameters)
    if gradient_follows(*given):
        out, second, *rows = _Layer.apply(operand.rows, weights, options, *given)
        return out, second, Fp8Rows(*rows) if rows else None
    ended, _ = _forward(operand, residual, parameters, weights, options, save=False)
    return ended.norm.out, ended.norm.second, ended.operand.rows


class _Layer(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Fp8Rows | None, weights: ProductWeights, options: LayerOptions,
        operand: Tensor, residual: Tensor, *parameters: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        learned = LayerParameters(*parameters)
        ended, saved = _forward(
            Operand(operand, rows), residual, learned, weights, options, save=True
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, *parameters)
        # Weights as products read them are nobody's to change: others come in their place.
        ctx.weights, ctx.options, ctx.residual_dtype = weights, options, residual.dtype
        ctx.same = operand is residual
        out, second, found = ended.norm.out, ended.norm.second, ended.operand.rows or ()
        ctx.mark_non_differentiable(*found)
        return out, second, *found

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
    with without_autocast(operand.wide.device):
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
    read = _operand(mixed.view(operand.wide.shape), weights)
    vectors = parameters.attention_bias, parameters.attention_gain, parameters.attention_shift
    owned = options.owned and weights.intermediate_bias is not None
    norm = options.attention._replace(rounds=weights.in_fp8)
    ended = _end(read, weights.attention, residual, vectors, norm, save=save, owned=owned)
    # What is not returned is free for the other half.
    out, seed = ended.norm, ended.seed
    kept = _Attended(operand.wide, states, read.wide, lse, out.sums, out.moments, seed)
    return ended, kept if save else ()


def _feed_forward_half(
    middle: _Ended, parameters: LayerParameters, weights: ProductWeights,
    options: NormOptions, *, save: bool,
) -> tuple[_Ended, Saved]:  # fmt: skip
    activated, product = _activated(middle.operand, parameters, weights, save=save)
    vectors = parameters.output_bias, parameters.output_gain, parameters.output_shift
    owned = weights.intermediate_bias is not None
    options = options._replace(rounds=options.rounds and weights.in_fp8)
    ended = _end(
        activated, weights.output, middle.norm.out, vectors, options, save=save, owned=owned
    )
    out, seed = ended.norm, ended.seed
    kept = _Fed(middle.operand.wide, product, activated.wide, out.sums, out.moments, seed)
    return ended, kept if save else ()


def _activated(
    operand: Operand, parameters: LayerParameters, weights: ProductWeights, *, save: bool
) -> tuple[Operand, Tensor | None]:
    """GELU of the product with its bias; and the product, if the backward reads it."""
    weight, bias = weights.intermediate, parameters.intermediate_bias
    if isinstance(weight, Fp8Weight):
        product = _product(operand, weight, None)
        rows = empty_rows(product)
        return Operand(_gelu_rows()(product, bias, rows, save=save), rows), product
    if save or weights.intermediate_bias is None:
        out, product = linear_gelu_and_product(operand.wide, weight, bias)
        return Operand(out, None), product
    return Operand(linear_gelu(operand.wide, weight, weights.intermediate_bias), None), None


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
    alone = owned and not save and not options.p and residual.dtype == x.wide.dtype
    if alone and isinstance(weight, Tensor):
        product, added = residual.addmm_(x.wide, weight.t()), None
    else:
        product = _product(x, weight, None)
    rows = empty_rows(product) if options.rounds else None
    out = _norm()(
        product, bias, added, gain, shift, seed, p=options.p, eps=options.eps,
        dtype=options.dtype, copy=options.copy, save=save, rows=rows,
    )  # fmt: skip
    return _Ended(out, Operand(out.out if out.second is None else out.second, rows), seed)


def _operand(wide: Tensor, weights: ProductWeights) -> Operand:
    """What no kernel has rounded on its way."""
    rows = empty_rows(wide) if weights.in_fp8 else None
    if rows is not None:
        _round()(wide, rows)
    return Operand(wide, rows)


def _product(x: Operand, weight: Weight, bias: Tensor | None) -> Tensor:
    """``x weight^T + bias``."""
    if isinstance(weight, Fp8Weight):
        assert x.rows is not None
        return linear_product(x.rows, weight, bias, x.wide.dtype)
    return torch.mm(x.wide, weight.t()) if bias is None else linear(x.wide, weight, bias)


def _input_gradient(grad: Operand, weight: Weight) -> Tensor:
    """``grad weight``."""
    if isinstance(weight, Fp8Weight):
        assert grad.rows is not None
        return input_gradient(grad.rows, weight.inputs, grad.wide.dtype)
    return torch.mm(grad.wide, weight)


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
        dproduct, dmiddle, (dgain, dbias, dshift) = self._norm(
            grads,
            fed,
            self.parameters.output_gain,
            self.options.output,
            self.options.attention.dtype,
        )
        doutput = self._of_weights(dproduct, fed.activated, "output_weight")
        dactivated = _input_gradient(dproduct, self.weights.output)
        dinner, dinner_bias = self._gelu(dactivated, fed)
        dintermediate = self._of_weights(dinner, fed.operand, "intermediate_weight")
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
            grads, attended, self.parameters.attention_gain, self.options.attention, residual_dtype
        )
        dattention = self._of_weights(dproduct, attended.mixed, "attention_weight")
        operands = self.options.operands(attended.states)
        shape = operands.query.shape
        dmixed = _input_gradient(dproduct, self.weights.attention).view(shape)
        wide = torch.empty_like(attended.states)
        _attend_backward()(
            dmixed, operands, attended.mixed.view(shape), attended.lse,
            gradients=self.options.operands(wide)[:3],
        )  # fmt: skip
        weight = self.weights.projection
        if isinstance(weight, Fp8Weight):
            dstates = Operand(wide, empty_rows(wide))
            dbiases = _round_and_add()(*dstates)
            doperand = _input_gradient(dstates, weight)
            doperand = dresidual.add_(doperand) if same else doperand
        else:
            dstates = Operand(wide, None)
            dbiases = wide.sum(0, dtype=torch.float32)
            doperand = dresidual.addmm_(wide, weight) if same else torch.mm(wide, weight)
        dprojection = self._of_weights(dstates, attended.operand, *LayerParameters._fields[:3])
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
        residual_dtype: torch.dtype,
    ) -> tuple[Operand, Tensor, Sequence[Tensor]]:
        """Gradients of the product, of the residual, and of gain, bias and shift."""
        rows = empty_rows(saved.operand) if self.weights.in_fp8 else None
        dproduct, dresidual, columns = _norm_backward()(
            grads[0], grads[1] if grads[1:] else None, None, saved.sums, saved.moments, gain,
            saved.seed, vectors=3, p=options.p, dtypes=(saved.operand.dtype, residual_dtype),
            rows=rows,
        )  # fmt: skip
        return Operand(dproduct, rows), dresidual, columns.unbind(0)

    def _gelu(self, grad: Tensor, fed: _Fed) -> tuple[Operand, Tensor]:
        """Gradients of the product before GELU and of its bias."""
        assert fed.product is not None
        given = grad, fed.product, self.parameters.intermediate_bias
        rows = empty_rows(fed.product) if self.weights.in_fp8 else None
        found = _gelu_backward()(*given) if rows is None else _gelu_rows_backward()(*given, rows)
        return Operand(found[0], rows), found[1]

    def _of_weights(self, grad: Operand, x: Tensor, *names: str) -> Tensor | None:
        """The gradient of one weight or of several, one above the other; None where none of them
        needs it."""
        if not any(getattr(self.needs, name) for name in names):
            return None
        return weight_gradient(grad.wide, x, getattr(self.parameters, names[0]).dtype)
