"""What comes before the layers of BERT's kind, and behind them, in one pass over memory each where
nothing is learned.

T packed tokens, D hidden width.
"""

import torch
from torch import Tensor, nn

from sparton.kernels.dispatch import autocast_dtype, needs_operators, without_autocast
from sparton.kernels.encoder_layer import embedding_norm
from sparton.kernels.encoder_layer.linear import linear_gelu_norm
from sparton.models.bert_parts import may_follow
from sparton.models.elementwise import has_kernels, is_gelu
from sparton.products import keeps_weights, kept


class FusedEmbeddings(nn.Module):
    """Embeddings of packed tokens, all of the first type.

    Args:
        stock: the module of transformers in whose place it comes; its parts keep their names, and
            their order, which is that of parameters in an optimizer's state.
    """

    word_embeddings: nn.Embedding
    position_embeddings: nn.Embedding
    token_type_embeddings: nn.Embedding
    LayerNorm: nn.LayerNorm
    dropout: nn.Dropout

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        for name, part in stock.named_children():
            self.add_module(name, part)

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: None) -> Tensor:
        """``[1, T, D]``, in fp16 where layers hand on sums in it, see :meth:`PostNorm.sum_dtype
        <sparton.models.bert_parts.PostNorm.sum_dtype>`."""
        first_type, norm, half = self.token_type_embeddings.weight[0], self.LayerNorm, torch.float16
        words, places = self.word_embeddings.weight, self.position_embeddings.weight
        if _encodes(self, words) and autocast_dtype(words) == half:
            rows = words, input_ids, first_type, places, position_ids
            return embedding_norm(*rows, norm.weight, norm.bias, eps=norm.eps, dtype=half)
        states = self.word_embeddings(input_ids) + first_type
        states = states + self.position_embeddings(position_ids)
        return self.dropout(norm(states))


class FusedTransform(nn.Module):
    """``LayerNorm(activation(dense(x)))``, what BERT's masked-LM head does before its decoder.

    Args:
        dense, transform_act_fn, LayerNorm: the parts, named as in transformers.
    """

    def __init__(
        self, dense: nn.Linear, transform_act_fn: nn.Module, LayerNorm: nn.LayerNorm
    ) -> None:
        super().__init__()
        self.dense, self.transform_act_fn, self.LayerNorm = dense, transform_act_fn, LayerNorm

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., D]``; in the dtype of products where they are in 16 bits and nothing is
        learned."""
        dense, norm, dtype = self.dense, self.LayerNorm, autocast_dtype(hidden_states)
        if dtype is None or not self._is_served(hidden_states):
            return norm(self.transform_act_fn(dense(hidden_states)))
        rows = hidden_states.flatten(0, -2).to(dtype)
        given = (kept(dtype, x) for x in (dense.weight, dense.bias, norm.weight, norm.bias))
        with without_autocast(hidden_states.device):
            states = linear_gelu_norm(rows, *given, eps=norm.eps)
        return states.view(hidden_states.shape)

    def _is_served(self, x: Tensor) -> bool:
        return _encodes(self, x) and is_gelu(self.transform_act_fn) and may_follow(x, self.dense)


def _encodes(module: nn.Module, x: Tensor) -> bool:
    """Whether a pass learns nothing, weights are kept in 16 bits, and our kernels may serve it."""
    # First what a compiled graph knows: asked for its mode, it would be one for each.
    if not keeps_weights() or needs_operators():
        return False
    return has_kernels(x) and not module.training and not torch.is_grad_enabled()
