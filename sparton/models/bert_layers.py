"""Layers of the BERT and RoBERTa kinds, made of the parts of :mod:`~sparton.models.bert_parts`; and
one function in the place of all parts of a layer, where it can be.

T packed tokens, D hidden width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Output

from sparton.kernels.dispatch import autocast_dtype, needs_operators
from sparton.kernels.encoder_layer import rounded
from sparton.kernels.post_norm_layer import (
    LayerOptions,
    LayerParameters,
    ProductWeights,
    post_norm_layer,
)
from sparton.models.attention import SHORT, has_short_kernel
from sparton.models.bert_parts import (
    Intermediate,
    LayerStates,
    Operand,
    PostNorm,
    SelfAttention,
    States,
    in_fp8,
    may_follow,
    operand_of,
    residual_of,
)
from sparton.models.elementwise import is_gelu
from sparton.products import keeps_weights, kept


class FusedLayer(GradientCheckpointingLayer):
    """A layer that calls its parts one after the other, or one function in their place, in 16 bits
    where weights are kept (:func:`~sparton.products.keeping_weights`): modules and functions of
    autograd of their own take the host longer than a small batch takes the device. transformers'
    own layer looks up the signature of a function at every call besides. Hooks of the parts are not
    called then; those of the layer are.

    Args:
        attention, intermediate, output: the parts, named as in transformers.
    """

    def __init__(self, attention: Any, intermediate: Any, output: Any) -> None:
        super().__init__()
        self.attention, self.intermediate, self.output = attention, intermediate, output

    def forward(
        self,
        hidden_states: States,
        attention_mask: Tensor | None = None,
        *,
        owned: bool = False,
        **options: Any,
    ) -> States:
        """``[1, T, D]``; ``options`` are those of packed attention. ``owned``: nobody else has the
        states, so that they may be written over."""
        if self._can_be_one(hidden_states, **options):
            return self._as_one(hidden_states, owned=owned, **options)
        attended, _ = self.attention(hidden_states, attention_mask, **options)
        return self.output(self.intermediate(attended), attended)

    def _can_be_one(
        self, states: States, *, max_length_q: int, key_rows: Tensor | None = None, **_: Any
    ) -> bool:
        """Whether the function does what all parts would do."""
        x, (attention, first, inner, last) = operand_of(states), self._parts
        dtype = autocast_dtype(x)
        if dtype is None or needs_operators() or not keeps_weights():
            return False
        linears = (*attention.projections, first.dense, inner.dense, last.dense)
        return (
            key_rows is None
            and max_length_q <= SHORT
            and has_short_kernel(x, dtype, attention.head_width)
            and is_gelu(inner.intermediate_act_fn)
            and first.p < 1 > last.p
            and len({part.rounded is None for part in self._parts}) == 1
            and all(may_follow(x, linear) for linear in linears)
        )

    def _as_one(
        self, states: States, *, cu_seq_lens_q: Tensor, max_length_q: int, owned: bool, **_: Any
    ) -> States:
        narrow, wide = operand_of(states), residual_of(states)
        dtype = autocast_dtype(narrow)
        assert dtype is not None
        attention, first, inner, last = self._parts
        query, key, value = attention.projections
        weights = query.weight, key.weight, value.weight
        biases = query.bias, key.bias, value.bias
        of_inner = inner.dense.weight, inner.dense.bias
        parameters = LayerParameters(*weights, *biases, *first.learned, *of_inner, *last.learned)
        matrices = weights, (first.dense.weight,), (inner.dense.weight,), (last.dense.weight,)
        rounds = attention.rounded is not None
        projected, ended, fed, left = (
            part.rounded(given) if part.rounded else kept(dtype, *given)
            for part, given in zip(self._parts, matrices, strict=True)
        )
        of_gelu = None if self.training or rounds else kept(dtype, parameters.intermediate_bias)
        products = ProductWeights(projected, kept(dtype, *biases), ended, fed, left, of_gelu)
        sequences, heads = (cu_seq_lens_q, max_length_q), (attention.heads, attention.scale)
        ends = first.options(dtype), last.options(dtype)
        options = LayerOptions(*sequences, *heads, *ends, owned)
        operand = narrow.squeeze(0)
        # One tensor stays one: the layer adds its two gradients on its way.
        residual = operand if wide is narrow else wide.squeeze(0)
        given = operand.to(dtype)
        read: Operand = in_fp8(states, dtype)._replace(wide=given) if rounds else given
        out, copy, limits = post_norm_layer(read, residual, parameters, products, options)
        narrow = (out if copy is None else copy)[None]
        if limits is not None:
            in_both = rounded(narrow, limits, turned=torch.is_grad_enabled())
            return LayerStates(out[None], in_both)
        return out[None] if copy is None else LayerStates(out[None], narrow)

    @property
    def _parts(self) -> tuple[SelfAttention, PostNorm, Intermediate, PostNorm]:
        return self.attention.self, self.attention.output, self.intermediate, self.output


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
        layers: list[Any] = list(self.layer)
        for before, layer in zip([None, *layers], layers, strict=False):
            owned = before is not None and keeps_weights() and not _watched(before, layer)
            states = layer(states, attention_mask, owned=owned, **options)
        return Output(last_hidden_state=residual_of(states))

    def _entered(self, states: Tensor) -> States:
        """fp32 embeddings in the form in which layers hand their states on, so that all layers
        share a graph."""
        dtype = autocast_dtype(states)
        first: Any = self.layer[0]
        if not self.both or dtype in (None, states.dtype):
            return states
        if not may_follow(states, first.output.dense):
            return states
        operand = states.to(dtype)
        return operand if first.output.sum_dtype(dtype) == dtype else LayerStates(states, operand)


def _watched(before: nn.Module, layer: nn.Module) -> bool:
    """Whether hooks see what one layer hands on to the next, and may keep it."""
    of_all = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return any((before._forward_hooks, layer._forward_pre_hooks, *of_all))
