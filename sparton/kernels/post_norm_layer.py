"""A whole layer of BERT's kind as one function of autograd.

Its parts are those of :mod:`~sparton.kernels.encoder_layer` and
:mod:`~sparton.kernels.varlen_attention` with matrix products between them. As functions and modules
of their own they take the host several times as long as their launches do, for which the device
waits where a batch is small, as in a step of many parts or in a small model.

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

Saved = tuple[Tensor | None, ...]


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
    """What the products read of them, in their dtype.

    Attributes:
        projection: ``[3 D, D]``, weights of queries, keys and values one above the other.
        projection_bias: ``[3 D]``.
        attention: ``[D, D]``.
        intermediate: ``[F, D]``.
        output: ``[D, F]``.
        intermediate_bias: ``[F]``; where it is given, passes without a graph leave bias and GELU to
            the product, see :func:`~sparton.kernels.encoder_layer.linear.linear_gelu`.
    """

    projection: Tensor
    projection_bias: Tensor
    attention: Tensor
    intermediate: Tensor
    output: Tensor
    intermediate_bias: Tensor | None = None


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


@on_its_device
def post_norm_layer(
    operand: Tensor,
    residual: Tensor,
    parameters: LayerParameters,
    weights: ProductWeights,
    options: LayerOptions,
) -> tuple[Tensor, Tensor | None]:
    """Attention and the feed-forward part with GELU, each added to what it read, after dropout, and
    normalised.

    Args:
        operand: ``[T, D]`` float16 or bfloat16, contiguous, on a GPU; T is not 0, and d is one that
            :func:`~sparton.kernels.varlen_attention.varlen_self_attention` serves.
        residual: ``[T, D]``, contiguous, the same in the dtype of sums.
        parameters: those that gradients are for.
        weights: the same in the dtype of the operand. No gradient flows through them: it goes to
            the parameters themselves, and in fp32 to those in fp32.

    Returns:
        What the layer hands on, ``[T, D]``, and its copy or None, see
        :func:`~sparton.kernels.encoder_layer.post_norm_and_copy`. Differentiable once.
    """
    given = (operand, residual, *parameters)
    if gradient_follows(*given):
        return _Layer.apply(weights, options, *given)
    out, _ = _forward(operand, residual, parameters, weights, options, save=False)
    return out.out, out.second


class _Layer(Function):
    @staticmethod
    def forward(
        ctx: Any, weights: ProductWeights, options: LayerOptions, operand: Tensor,
        residual: Tensor, *parameters: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        learned = LayerParameters(*parameters)
        out, saved = _forward(operand, residual, learned, weights, options, save=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, *weights, *parameters)
        ctx.options, ctx.residual_dtype = options, residual.dtype
        ctx.same = operand is residual
        return out.out, out.second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = [grad.contiguous() for grad in grads if grad is not None]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        saved = iter(ctx.saved_tensors)
        attended, fed = _take(_Attended, saved), _take(_Fed, saved)
        weights, parameters = _take(ProductWeights, saved), _take(LayerParameters, saved)
        needs = LayerParameters(*ctx.needs_input_grad[-len(parameters) :])
        layer = _Backward(parameters, weights, ctx.options, needs)
        with without_autocast(given[0].device):
            middle, narrow, of_output = layer.feed_forward(given, fed)
            operand, residual, of_attention = layer.attention(
                [middle, narrow], attended, ctx.residual_dtype, same=ctx.same
            )
        return None, None, operand, residual, *of_attention, *of_output


def _take(kind: Any, tensors: Iterator[Tensor]) -> Any:
    return kind(*islice(tensors, len(kind._fields)))


def _forward(
    operand: Tensor, residual: Tensor, parameters: LayerParameters, weights: ProductWeights,
    options: LayerOptions, *, save: bool,
) -> tuple[Normalised, Saved]:  # fmt: skip
    """The result, and what the backward reads if ``save``: :class:`_Attended` and :class:`_Fed`."""
    with without_autocast(operand.device):
        middle, attended = _attention_half(
            operand, residual, parameters, weights, options, save=save
        )
        out, fed = _feed_forward_half(middle, parameters, weights, options.output, save=save)
    return out, (*attended, *fed)


def _attention_half(
    operand: Tensor, residual: Tensor, parameters: LayerParameters, weights: ProductWeights,
    options: LayerOptions, *, save: bool,
) -> tuple[Normalised, Saved]:  # fmt: skip
    states = linear(operand, weights.projection, weights.projection_bias)
    mixed, lse = _attend()(options.operands(states), lse=save)
    mixed = mixed.view(operand.shape)
    vectors = parameters.attention_bias, parameters.attention_gain, parameters.attention_shift
    owned = options.owned and weights.intermediate_bias is not None
    out, seed = _ended(
        mixed, weights.attention, residual, vectors, options.attention, save=save, owned=owned
    )
    # What is not returned is free for the other half.
    kept = _Attended(operand, states, mixed, lse, out.sums, out.moments, seed)
    return out, kept if save else ()


def _feed_forward_half(
    middle: Normalised, parameters: LayerParameters, weights: ProductWeights,
    options: NormOptions, *, save: bool,
) -> tuple[Normalised, Saved]:  # fmt: skip
    operand = middle.out if middle.second is None else middle.second
    bias, product = weights.intermediate_bias, None
    if save or bias is None:
        activated, product = linear_gelu_and_product(
            operand, weights.intermediate, parameters.intermediate_bias
        )
    else:
        activated = linear_gelu(operand, weights.intermediate, bias)
    vectors = parameters.output_bias, parameters.output_gain, parameters.output_shift
    out, seed = _ended(
        activated, weights.output, middle.out, vectors, options, save=save, owned=bias is not None
    )
    kept = _Fed(operand, product, activated, out.sums, out.moments, seed)
    return out, kept if save else ()


def _ended(
    x: Tensor, weight: Tensor, residual: Tensor, vectors: tuple[Tensor, Tensor, Tensor],
    options: NormOptions, *, save: bool, owned: bool,
) -> tuple[Normalised, Tensor | None]:  # fmt: skip
    """The end of a half, given bias, gain and shift; and the seed of its dropout. Where nobody else
    has the residual (``owned``) and no backward reads it, the product is added to it where it lies,
    and the normalisation reads a tensor less."""
    bias, gain, shift = vectors
    seed = draw_seed(x.device) if options.p else None
    added: Tensor | None = residual
    if owned and not save and not options.p and residual.dtype == x.dtype:
        product, added = residual.addmm_(x, weight.t()), None
    else:
        product = torch.mm(x, weight.t())
    out = _norm()(
        product, bias, added, gain, shift, seed, p=options.p, eps=options.eps,
        dtype=options.dtype, copy=options.copy, save=save,
    )  # fmt: skip
    return out, seed


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
        dactivated = torch.mm(dproduct, self.weights.output)
        dinner, dinner_bias = _gelu_backward()(
            dactivated, fed.product, self.parameters.intermediate_bias
        )
        dintermediate = self._of_weights(dinner, fed.operand, "intermediate_weight")
        doperand = torch.mm(dinner, self.weights.intermediate)
        return dmiddle, doperand, [dintermediate, dinner_bias, doutput, dbias, dgain, dshift]

    def attention(
        self,
        grads: list[Tensor],
        attended: _Attended,
        residual_dtype: torch.dtype,
        *,
        same: bool,
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """The same of the half before. Where one tensor is its operand and residual, the product
        ends in the sum of both gradients, which is otherwise a pass of its own."""
        dproduct, dresidual, (dgain, dbias, dshift) = self._norm(
            grads, attended, self.parameters.attention_gain, self.options.attention, residual_dtype
        )
        dattention = self._of_weights(dproduct, attended.mixed, "attention_weight")
        operands = self.options.operands(attended.states)
        shape = operands.query.shape
        dmixed = torch.mm(dproduct, self.weights.attention).view(shape)
        dstates = torch.empty_like(attended.states)
        _attend_backward()(
            dmixed, operands, attended.mixed.view(shape), attended.lse,
            gradients=self.options.operands(dstates)[:3],
        )  # fmt: skip
        weight = self.weights.projection
        doperand = dresidual.addmm_(dstates, weight) if same else torch.mm(dstates, weight)
        dprojection = self._of_weights(dstates, attended.operand, *LayerParameters._fields[:3])
        dweights = [None] * 3 if dprojection is None else dprojection.chunk(3)
        dbiases = dstates.sum(0, dtype=torch.float32).chunk(3)
        of_residual = None if same else dresidual
        return doperand, of_residual, [*dweights, *dbiases, dattention, dbias, dgain, dshift]

    def _norm(
        self,
        grads: list[Tensor],
        saved: _Attended | _Fed,
        gain: Tensor,
        options: NormOptions,
        residual_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Gradients of the product, of the residual, and of gain, bias and shift."""
        dproduct, dresidual, columns = _norm_backward()(
            grads[0], grads[1] if grads[1:] else None, None, saved.sums, saved.moments, gain,
            saved.seed, vectors=3, p=options.p, dtypes=(saved.operand.dtype, residual_dtype),
        )  # fmt: skip
        return dproduct, dresidual, columns.unbind(0)

    def _of_weights(self, grad: Tensor, x: Tensor, *names: str) -> Tensor | None:
        """The gradient of one weight or of several, one above the other; None where none of them
        needs it."""
        if not any(getattr(self.needs, name) for name in names):
            return None
        return weight_gradient(grad, x, getattr(self.parameters, names[0]).dtype)
