"""Layers of the BERT and RoBERTa kinds with few passes over memory between their matrix products.

Names and parameters are those of transformers' layers. One product gives queries, keys and values,
and our kernels do the rest on a GPU, compiled or not. Under autocast the layers hand on
:class:`LayerStates`. In FP8 they multiply under autocast where
:func:`~sparton.models.fp8.multiply_in_fp8` or :func:`~sparton.models.fp8.encoding_in_fp8` says so.

T packed tokens, D hidden width, H heads, d the width of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Output

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

    def _in_fp8(
        self, states: States | Fp8Operand, *linears: nn.Linear
    ) -> tuple[Fp8Operand, Layer] | None:
        """The operand of a product in FP8 and the weights of these layers, one above the other;
        None where the product is another one."""
        rounded = self.fp8 if self.training else self.encoding_fp8
        if rounded is None:
            return None
        operand = states.operand if isinstance(states, LayerStates) else states
        if not isinstance(operand, Fp8Operand):
            dtype = autocast_dtype(operand)
            if dtype is None or not all(_has_kernels(operand, linear) for linear in linears):
                return None
            operand = fp8_operand(operand.to(dtype))
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
        self.heads, self.scale = stock.num_attention_heads, stock.scaling

    def forward(self, hidden_states: States, **options: Any) -> tuple[Tensor, None]:
        """``[1, T, D]``, and None for the weights; see
        :func:`~sparton.models.attention.packed_self_attention`."""
        states = self._projected(hidden_states).squeeze(0)
        states = states.unflatten(-1, (3, self.heads, -1))
        mixed = packed_self_attention(states, self.scale, **options)
        return mixed.flatten(1)[None], None

    def _projected(self, states: States) -> Tensor:
        """``[1, T, 3 D]``."""
        parts = (self.query, self.key, self.value)
        if (given := self._in_fp8(states, *parts)) is not None:
            return fp8_linear(*given)
        return linear(_operand(states), *parts)


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
        x, residual = _wide(hidden_states), _residual(input_tensor)
        p, norm = self.dropout.p if self.dropout.training else 0.0, self.LayerNorm
        given = None if p == 1 else self._in_fp8(hidden_states, self.dense)
        if given is None and (p == 1 or not _has_kernels(x, self.dense)):
            return norm(self.dropout(self.dense(x)) + residual)
        product_dtype = autocast_dtype(residual)
        dtype = None if product_dtype is None else self.sum_dtype(product_dtype)
        copy = None if product_dtype == dtype or not self.both else product_dtype
        vectors = (residual, norm.weight, norm.bias)
        if given is not None:
            assert dtype is not None
            options = NormOptions(norm.eps, p, dtype, copy, rounds=self.both)
            out, operand = fp8_linear_post_norm(*given, *vectors, options)
            return out if operand is None else LayerStates(out, operand)
        operands = (linear(x, self.dense, bias=False), self.dense.bias, *vectors)
        if copy is None:
            return post_norm(*operands, eps=norm.eps, p=p, dtype=dtype)
        return LayerStates(
            *post_norm_and_copy(*operands, eps=norm.eps, p=p, dtype=dtype, copy=copy)
        )

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
        x = _operand(hidden_states)
        if not is_gelu(self.intermediate_act_fn) or not _has_kernels(x, self.dense):
            return self.intermediate_act_fn(self.dense(x))
        return bias_gelu(linear(x, self.dense, bias=False), self.dense.bias)


class FusedLayer(GradientCheckpointingLayer):
    """A layer that calls its parts one after the other. transformers' own looks up the signature of
    a function at every call, which takes the host as long as a kernel's launch.

    Args:
        attention, intermediate, output: the parts, named as in transformers.
    """

    def __init__(self, attention: nn.Module, intermediate: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.attention, self.intermediate, self.output = attention, intermediate, output

    def forward(
        self, hidden_states: States, attention_mask: Tensor | None = None, **options: Any
    ) -> States:
        """``[1, T, D]``; ``options`` are those of packed attention."""
        attended, _ = self.attention(hidden_states, attention_mask, **options)
        return self.output(self.intermediate(attended), attended)


class FusedEncoder(nn.Module):
    """One layer after the other; the first finds the embeddings as others find their states.

    Args:
        layer: the layers, named as in transformers.
        both: under autocast, layers hand on :class:`LayerStates`.
    """

    def __init__(self, layer: nn.ModuleList, *, both: bool) -> None:
        super().__init__()
        self.layer, self.both = layer, both

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Output:
        """``last_hidden_state [1, T, D]``; ``options`` are those of packed attention."""
        states: States = self._entered(hidden_states)
        for layer in self.layer:
            states = layer(states, attention_mask, **options)
        return Output(last_hidden_state=_residual(states))

    def _entered(self, states: Tensor) -> States:
        """fp32 embeddings in the form in which layers hand their states on, so that all layers
        share a graph."""
        dtype = autocast_dtype(states)
        first: Any = self.layer[0]
        if not self.both or dtype in (None, states.dtype):
            return states
        if not _has_kernels(states, first.output.dense):
            return states
        operand = states.to(dtype)
        return operand if first.output.sum_dtype(dtype) == dtype else LayerStates(states, operand)


def _wide(operand: Operand) -> Tensor:
    return operand.wide if isinstance(operand, Fp8Operand) else operand


def _operand(states: States) -> Tensor:
    return _wide(states.operand if isinstance(states, LayerStates) else states)


def _residual(states: States) -> Tensor:
    return states.residual if isinstance(states, LayerStates) else states


def _has_kernels(x: Tensor, dense: nn.Module) -> bool:
    """Whether our kernels may follow the product of ``x`` with the weight of ``dense``, whose own
    forward they pass over: an adapter's must not be."""
    return has_kernels(x) and type(dense) is nn.Linear
