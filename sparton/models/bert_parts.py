"""Parts of layers of the BERT and RoBERTa kinds with few passes over memory between their matrix
products.

Names and parameters are those of transformers' parts. One product gives queries, keys and values,
and our kernels do the rest on a GPU, compiled or not. Under autocast the ends of layers hand on
:class:`LayerStates`. In FP8 parts multiply under autocast where
:func:`~sparton.models.fp8.multiply_in_fp8` or :func:`~sparton.models.fp8.encoding_in_fp8` says so.

T packed tokens, D hidden width, H heads, d the width of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparton.kernels.dispatch import autocast_dtype
from sparton.kernels.encoder_layer import (
    Fp8Operand,
    Fp8Weights,
    Layer,
    NormOptions,
    bias_gelu,
    fp8_linear,
    fp8_linear_gelu,
    fp8_linear_post_norm,
    fp8_operand,
    post_norm,
    post_norm_and_copy,
)
from sparton.models.attention import packed_self_attention
from sparton.models.elementwise import HalfLayerNorm, has_kernels, is_gelu
from sparton.products import linear

Operand = Tensor | Fp8Operand


class LayerStates(NamedTuple):
    """What a layer hands on where sums are kept in more bits than matrix products read: both, made
    in one pass, so that no product has to round its operand first.

    Attributes:
        residual: ``[1, T, D]``, what the next result is added to.
        operand: the same in the dtype of the products, and in FP8 where these are.
    """

    residual: Tensor
    operand: Operand


States = Tensor | LayerStates


class FusedPart(nn.Module):
    """A part of a layer with a matrix product.

    Attributes:
        fp8: its weights in FP8, where it multiplies in FP8 while it trains.
        encoding_fp8: the same in evaluation mode.
    """

    fp8: Fp8Weights | None = None
    encoding_fp8: Fp8Weights | None = None

    @property
    def rounded(self) -> Fp8Weights | None:
        """Its weights in FP8 in the mode in which it is."""
        return self.fp8 if self.training else self.encoding_fp8

    def _in_fp8(
        self, states: States | Fp8Operand, *linears: nn.Linear
    ) -> tuple[Fp8Operand, Layer] | None:
        """The operand of a product in FP8 and the weights of these layers, one above the other;
        None where the product is another one."""
        rounded = self.rounded
        if rounded is None:
            return None
        operand = _read(states)
        if not isinstance(operand, Fp8Operand):
            dtype = autocast_dtype(operand)
            if dtype is None or not all(may_follow(operand, linear) for linear in linears):
                return None
            operand = in_fp8(operand, dtype)
        weights, biases = ([getattr(x, name) for x in linears] for name in ("weight", "bias"))
        bias = biases[0] if len(biases) == 1 else torch.cat(biases)
        return operand, Layer(weights, bias, rounded(weights))


class SelfAttention(FusedPart):
    """Self-attention with one matrix product for queries, keys and values.

    Args:
        stock: the module of transformers in whose place it comes.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.query, self.key, self.value = stock.query, stock.key, stock.value
        self.heads, self.head_width = stock.num_attention_heads, stock.attention_head_size
        self.scale = stock.scaling

    def forward(self, hidden_states: States, **options: Any) -> tuple[Tensor, None]:
        """``[1, T, D]``, and None for the weights; see
        :func:`~sparton.models.attention.packed_self_attention`."""
        states = self._projected(hidden_states).squeeze(0)
        states = states.unflatten(-1, (3, self.heads, -1))
        mixed = packed_self_attention(states, self.scale, **options)
        return mixed.flatten(1)[None], None

    def _projected(self, states: States) -> Tensor:
        """``[1, T, 3 D]``."""
        if (given := self._in_fp8(states, *self.projections)) is not None:
            return fp8_linear(*given)
        return linear(operand_of(states), *self.projections)

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """The layers that give queries, keys and values."""
        return self.query, self.key, self.value


class PostNorm(FusedPart):
    """``LayerNorm(residual + dropout(dense(x)))``, the end of both halves of a layer.

    Args:
        dense, dropout, LayerNorm: the parts, named as in transformers.
        both: under autocast, hand on :class:`LayerStates`.
    """

    def __init__(
        self,
        dense: nn.Linear,
        dropout: nn.Dropout,
        LayerNorm: nn.LayerNorm,
        *,
        both: bool = True,
    ) -> None:
        super().__init__()
        self.dense, self.dropout, self.LayerNorm = dense, dropout, LayerNorm
        self.both = both

    def forward(self, hidden_states: Operand, input_tensor: States) -> States:
        x, residual, norm = _wide(hidden_states), residual_of(input_tensor), self.LayerNorm
        given = None if self.p == 1 else self._in_fp8(hidden_states, self.dense)
        if given is None and (self.p == 1 or not may_follow(x, self.dense)):
            return norm(self.dropout(self.dense(x)) + residual)
        vectors = (residual, norm.weight, norm.bias)
        dtype = autocast_dtype(residual)
        options = None if dtype is None else self.options(dtype)
        if given is not None:
            assert options is not None
            out, operand = fp8_linear_post_norm(*given, *vectors, options)
            return out if operand is None else LayerStates(out, operand)
        operands = (linear(x, self.dense, bias=False), self.dense.bias, *vectors)
        if options is None:
            return post_norm(*operands, eps=norm.eps, p=self.p)
        eps, p, dtype, copy, _ = options
        if copy is None:
            return post_norm(*operands, eps=eps, p=p, dtype=dtype)
        return LayerStates(*post_norm_and_copy(*operands, eps=eps, p=p, dtype=dtype, copy=copy))

    @property
    def learned(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weight and bias of the product and of the normalisation."""
        dense, norm = self.dense, self.LayerNorm
        return dense.weight, dense.bias, norm.weight, norm.bias

    @property
    def p(self) -> float:
        """Which share its dropout drops, in the mode in which it is."""
        return self.dropout.p if self.dropout.training else 0.0

    def options(self, product_dtype: torch.dtype) -> NormOptions:
        """What it does under autocast to this dtype."""
        dtype = self.sum_dtype(product_dtype)
        copy = None if product_dtype == dtype or not self.both else product_dtype
        return NormOptions(self.LayerNorm.eps, self.p, dtype, copy, limits=self.both)

    def sum_dtype(self, product_dtype: torch.dtype) -> torch.dtype:
        """In which sums are handed on, given that of products: fp32, as normalisations give it
        under autocast, or that of the products, with half the traffic. Encoding takes the latter
        where these have fp16's digits, or FP8's, which are fewer than either has."""
        if self.training:
            half = product_dtype == torch.bfloat16 and isinstance(self.LayerNorm, HalfLayerNorm)
        else:
            half = product_dtype == torch.float16 or self.encoding_fp8 is not None
            half = half or isinstance(self.LayerNorm, HalfLayerNorm)
        return product_dtype if half else torch.float32


class Intermediate(FusedPart):
    """``activation(dense(x))``, the middle of a layer.

    Args:
        dense, intermediate_act_fn: the parts, named as in transformers.
    """

    def __init__(self, dense: nn.Linear, intermediate_act_fn: nn.Module) -> None:
        super().__init__()
        self.dense, self.intermediate_act_fn = dense, intermediate_act_fn

    def forward(self, hidden_states: States) -> Operand:
        if (given := self._in_fp8(hidden_states, self.dense)) is not None:
            if is_gelu(self.intermediate_act_fn):
                return fp8_linear_gelu(*given)
            return self.intermediate_act_fn(fp8_linear(*given))
        x = operand_of(hidden_states)
        if not is_gelu(self.intermediate_act_fn) or not may_follow(x, self.dense):
            return self.intermediate_act_fn(self.dense(x))
        return bias_gelu(linear(x, self.dense, bias=False), self.dense.bias)


def _read(states: States | Fp8Operand) -> Operand:
    return states.operand if isinstance(states, LayerStates) else states


def in_fp8(states: States | Fp8Operand, dtype: torch.dtype) -> Fp8Operand:
    """What the part before has rounded to FP8, or states in this dtype, which nothing has."""
    operand = _read(states)
    return operand if isinstance(operand, Fp8Operand) else fp8_operand(operand.to(dtype))


def _wide(operand: Operand) -> Tensor:
    return operand.wide if isinstance(operand, Fp8Operand) else operand


def operand_of(states: States) -> Tensor:
    return _wide(_read(states))


def residual_of(states: States) -> Tensor:
    return states.residual if isinstance(states, LayerStates) else states


def may_follow(x: Tensor, dense: nn.Module) -> bool:
    """Whether our kernels may follow the product of ``x`` with the weight of ``dense``, whose own
    forward they pass over: an adapter's must not be."""
    return has_kernels(x) and type(dense) is nn.Linear
