"""ModernBERT's layers with few passes over memory between their matrix products.

transformers' modules stay, with their names and parameters, and become instances of the classes
here, whose forwards run our kernels on a GPU, compiled or not. A norm comes before each half of a
layer: the one kernel adds what the half before gave and normalises the sum.

T packed tokens, D hidden width, H heads, d the width of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.modernbert.modeling_modernbert import (
    ModernBertAttention,
    ModernBertEncoderLayer,
    ModernBertMLP,
    ModernBertModel,
    apply_rotary_pos_emb,
)

from sparton.kernels.encoder_layer import gated_gelu, pre_norm, rotary
from sparton.models.attention import packed_self_attention
from sparton.models.elementwise import autocast_dtype, has_kernels, is_gelu
from sparton.types import TokenRows


class Unsummed(NamedTuple):
    """What a layer hands on, for the next norm to add.

    Attributes:
        residual: ``[1, T, D]``, the sum of all before.
        update: ``[1, T, D]``, what the layer's last product gave.
    """

    residual: Tensor
    update: Tensor


States = Tensor | Unsummed


class FusedLayer(ModernBertEncoderLayer):
    """A layer whose last sum is left to the next.

    Attributes:
        unsummed: hand on :class:`Unsummed`, else its sum.
    """

    unsummed: bool

    def forward(  # type: ignore[override]
        self,
        hidden_states: States,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: object,
    ) -> States:
        """``[1, T, D]``; ``options`` are those of packed attention."""
        residual, operand = _normed(hidden_states, self.attn_norm)
        update, _ = self.attn(operand, position_embeddings, **options)
        residual, operand = _normed(Unsummed(residual, update), self.mlp_norm)
        update = self.mlp(operand)
        return Unsummed(residual, update) if self.unsummed else residual + update


class FusedAttention(ModernBertAttention):
    """Self-attention whose queries, keys and values stay side by side, as the product gives them;
    one kernel turns them by the angles of their positions."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        cu_seq_lens_k: Tensor,
        max_length_k: int,
        key_rows: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """``[1, T, D]``, and None for the weights; see
        :func:`~sparton.models.attention.packed_attention`."""
        keys = None if key_rows is None else TokenRows(key_rows, cu_seq_lens_k, max_length_k)
        states = self.Wqkv(hidden_states.squeeze(0)).unflatten(-1, (3, -1, self.head_dim))
        cos, sin = (angles.squeeze(0) for angles in position_embeddings)
        if has_kernels(states):
            states = rotary(states, cos, sin)
        else:
            query, key, value = states.unbind(1)
            query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=1)
            states = torch.stack((query, key, value), dim=1)
        mixed = packed_self_attention(
            states, cu_seq_lens_q, max_length_q, keys, self.head_dim**-0.5, self.sliding_window
        )
        return self.out_drop(self.Wo(mixed.flatten(1)))[None], None


class FusedMLP(ModernBertMLP):
    """``Wo(act(u) * gate)`` of ``u, gate = Wi(x)``."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        product = self.Wi(hidden_states)
        if is_gelu(self.act) and has_kernels(product):
            return self.Wo(self.drop(gated_gelu(product)))
        u, gate = product.chunk(2, dim=-1)
        return self.Wo(self.drop(self.act(u) * gate))


class FinalNorm(nn.LayerNorm):
    """The norm behind the last layer; its result is in the dtype of the sum."""

    def forward(self, states: States) -> Tensor:
        if isinstance(states, Unsummed):
            if has_kernels(states.update):
                return pre_norm(states.update, states.residual, self.weight, eps=self.eps)[1]
            states = states.residual + states.update
        return super().forward(states).to(states.dtype)


def fuse_modernbert(model: Any, *, both: bool) -> None:
    """Let a body of transformers' own parts, whose norms have no bias, run with those of this
    module, in place; any other module stays as it is.

    Args:
        model: looked at itself, not what is below it.
        both: layers hand on :class:`Unsummed`.
    """
    if not _is_stock(model):
        return
    for layer in model.layers:
        layer.__class__, layer.unsummed = FusedLayer, both
        layer.attn.__class__, layer.mlp.__class__ = FusedAttention, FusedMLP
    model.final_norm.__class__ = FinalNorm


def _is_stock(model: Any) -> bool:
    if type(model) is not ModernBertModel:
        return False
    layers: list[Any] = list(model.layers)
    kinds = {(type(layer), type(layer.attn), type(layer.mlp)) for layer in layers}
    norms = [layer.attn_norm for layer in layers if type(layer.attn_norm) is not nn.Identity]
    norms += [layer.mlp_norm for layer in layers]
    return kinds <= {(ModernBertEncoderLayer, ModernBertAttention, ModernBertMLP)} and all(
        type(norm) is nn.LayerNorm and norm.bias is None for norm in (*norms, model.final_norm)
    )


def _normed(states: States, norm: Any) -> tuple[Tensor, Tensor]:
    """The sum, and what a norm makes of it for the next product."""
    if isinstance(states, Unsummed):
        residual, update = states
        if has_kernels(update):
            dtype = autocast_dtype(update)
            return pre_norm(update, residual, norm.weight, eps=norm.eps, dtype=dtype)
        states = residual + update
    return states, norm(states)
