"""Layers of Llama's kind with few passes over memory between their matrix products.

transformers' modules stay, with their names and parameters, and become instances of the classes
here, whose forwards run our kernels on a GPU, compiled or not. Linear layers are called as they
are: adapters may stand in their places, or one be frozen beside another that learns. Queries and
keys stay in the dtype of their products, which rotary positions in fp32 would widen.

T packed tokens, D hidden width, H heads, d the width of a head.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
)

from sparton.kernels.encoder_layer import (
    gated_silu,
    normed_rotary,
    normed_rotary_reference,
    rotary,
    rotary_reference,
)
from sparton.models.attention import packed_attention
from sparton.models.elementwise import has_kernels, is_silu
from sparton.models.residuals import States, Unsummed, normed
from sparton.products import linear

# How the classes of a family begin, by its model type.
DECODERS = {
    "granite": "Granite",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
}
_PARTS = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")


class FusedLayer(LlamaDecoderLayer):
    """A layer whose last sum is left to the next.

    Attributes:
        unsummed: hand on :class:`~sparton.models.residuals.Unsummed`, else its sum.
        residual_multiplier: factor of what its halves add, as Granite has it.
    """

    unsummed: bool
    residual_multiplier: float

    def forward(  # type: ignore[override]
        self,
        hidden_states: States,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: object,
    ) -> States:
        """``[1, T, D]``; ``options`` are those of packed attention."""
        residual, operand = normed(hidden_states, self.input_layernorm)
        update = self._scaled(self.self_attn(operand, position_embeddings, **options))
        residual, operand = normed(Unsummed(residual, update), self.post_attention_layernorm)
        update = self._scaled(self.mlp(operand))
        return Unsummed(residual, update) if self.unsummed else residual + update

    def _scaled(self, update: Tensor) -> Tensor:
        return update if self.residual_multiplier == 1 else update * self.residual_multiplier


class FusedAttention(LlamaAttention):
    """Self-attention whose queries and keys are normalised, where the family does that, and turned
    by the angles of their positions in one pass.

    Attributes:
        use_rope: whether they are turned at all.
        sliding_window: see :func:`~sparton.models.attention.packed_attention`.
    """

    use_rope: bool
    sliding_window: int | None

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **options: Any
    ) -> Tensor:
        """``[1, T, D]``; see :func:`~sparton.models.attention.packed_attention`."""
        query, key, value = (
            linear(hidden_states.squeeze(0), part).unflatten(-1, (-1, self.head_dim))
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.use_rope:
            cos, sin = (angles.squeeze(0) for angles in position_embeddings)
            query = _turned(query, getattr(self, "q_norm", None), cos, sin)
            key = _turned(key, getattr(self, "k_norm", None), cos, sin)
        query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
        mixed, _ = packed_attention(
            self, query, key, value, None,
            scaling=self.scaling, sliding_window=self.sliding_window, **options,
        )  # fmt: skip
        return linear(mixed.flatten(2), self.o_proj)


class FusedMLP(LlamaMLP):
    """``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.gate_proj), linear(x, self.up_proj)
        if is_silu(self.act_fn) and has_kernels(gate) and gate.dtype == up.dtype:
            return linear(gated_silu(gate, up), self.down_proj)
        return linear(self.act_fn(gate) * up, self.down_proj)


class FinalNorm(LlamaRMSNorm):
    """The norm behind the last layer; its result is in the wider dtype of sum and weight."""

    def forward(self, hidden_states: States) -> Tensor:
        if not isinstance(hidden_states, Unsummed):
            return super().forward(hidden_states)
        dtype = torch.promote_types(hidden_states.residual.dtype, self.weight.dtype)
        return normed(hidden_states, self, dtype)[1]


def fuse_decoder(model: Any, *, both: bool, family: str) -> None:
    """Let a body of transformers' own parts run with those of this module, in place; any other
    module stays as it is.

    Args:
        model: looked at itself, not what is below it.
        both: layers hand on :class:`~sparton.models.residuals.Unsummed`.
        family: of :data:`DECODERS`.
    """
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    if not _is_stock(model, *(getattr(module, DECODERS[family] + part) for part in _PARTS)):
        return
    for layer in model.layers:
        layer.__class__, layer.unsummed = FusedLayer, both
        layer.residual_multiplier = getattr(layer, "residual_multiplier", 1.0)
        layer.mlp.__class__ = FusedMLP
        attention = layer.self_attn
        attention.__class__ = FusedAttention
        attention.use_rope = getattr(attention, "use_rope", True)
        # Mistral's layers ask the configuration, and Llama's have none whatever it says.
        given = model.config if family == "mistral" else attention
        attention.sliding_window = getattr(given, "sliding_window", None)
    model.norm.__class__ = FinalNorm


def _is_stock(model: Any, body: Any, layer: type, attention: type, mlp: type, norm: type) -> bool:
    if type(model) is not body:
        return False
    parts: list[tuple[nn.Module, type]] = [(model.norm, norm)]
    for each in model.layers:
        parts += [(each, layer), (each.self_attn, attention), (each.mlp, mlp)]
        parts += [(part, norm) for name, part in each.named_modules() if name.endswith("norm")]
    return all(type(part) is kind for part, kind in parts)


def _turned(states: Tensor, norm: Any, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys ``[T, H, d]``."""
    known = has_kernels(states)
    if norm is None:
        return (rotary if known else rotary_reference)(states, cos, sin)
    turn = normed_rotary if known else normed_rotary_reference
    return turn(states, norm.weight, cos, sin, eps=norm.variance_epsilon)
