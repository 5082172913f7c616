"""ModernBERT's layers with few passes over memory between their matrix products.

transformers' modules stay, with their names and parameters, and become instances of the classes
here, whose forwards run our kernels on a GPU, compiled or not.

T packed tokens, D hidden width, H heads, d the width of a head.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.modernbert.modeling_modernbert import (
    ModernBertAttention,
    ModernBertEncoderLayer,
    ModernBertMLP,
    ModernBertModel,
)

from sparton.kernels.encoder_layer import gated_gelu, rotary, rotary_reference
from sparton.models.attention import packed_self_attention
from sparton.models.elementwise import has_kernels, is_gelu
from sparton.models.residuals import States, Unsummed, normed
from sparton.products import linear


class FusedLayer(ModernBertEncoderLayer):
    """A layer whose last sum is left to the next.

    Attributes:
        unsummed: hand on :class:`~sparton.models.residuals.Unsummed`, else its sum.
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
        residual, operand = normed(hidden_states, self.attn_norm)
        update, _ = self.attn(operand, position_embeddings, **options)
        residual, operand = normed(Unsummed(residual, update), self.mlp_norm)
        update = self.mlp(operand)
        return Unsummed(residual, update) if self.unsummed else residual + update


class FusedAttention(ModernBertAttention):
    """Self-attention whose queries, keys and values stay side by side, as the product gives them;
    one kernel turns them by the angles of their positions."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **options: Any,
    ) -> tuple[Tensor, None]:
        """``[1, T, D]``, and None for the weights; see
        :func:`~sparton.models.attention.packed_self_attention`."""
        states = linear(hidden_states.squeeze(0), self.Wqkv).unflatten(-1, (-1, self.head_dim))
        cos, sin = (angles.squeeze(0) for angles in position_embeddings)
        turn = rotary if has_kernels(states) else rotary_reference
        states = turn(states, cos, sin, copied=states.shape[1] // 3).unflatten(1, (3, -1))
        mixed = packed_self_attention(states, self.head_dim**-0.5, self.sliding_window, **options)
        return self.out_drop(linear(mixed.flatten(1), self.Wo))[None], None


class FusedMLP(ModernBertMLP):
    """``Wo(act(u) * gate)`` of ``u, gate = Wi(x)``."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        product = linear(hidden_states, self.Wi)
        if is_gelu(self.act) and has_kernels(product):
            return linear(self.drop(gated_gelu(product)), self.Wo)
        u, gate = product.chunk(2, dim=-1)
        return linear(self.drop(self.act(u) * gate), self.Wo)


class FinalNorm(nn.LayerNorm):
    """The norm behind the last layer; its result is in the dtype of the sum."""

    def forward(self, states: States) -> Tensor:
        if isinstance(states, Unsummed):
            return normed(states, self, states.residual.dtype)[1]
        return super().forward(states).to(states.dtype)


def fuse_modernbert(model: Any, *, both: bool) -> None:
    """Let a body of transformers' own parts, whose norms have no bias, run with those of this
    module, in place; any other module stays as it is.

    Args:
        model: looked at itself, not what is below it.
        both: layers hand on :class:`~sparton.models.residuals.Unsummed`.
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
