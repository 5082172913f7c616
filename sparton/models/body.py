"""The body of a Hugging Face encoder as a producer of packed hidden states.

T packed tokens, N sequences, S a sequence's length, D hidden width, V vocabulary, L layers.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AddedToken, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from sparton.arguments import ArgumentError
from sparton.models.elementwise import replace_dropout, replace_layer_norms
from sparton.models.layers import fuse_layers
from sparton.models.layouts import Layout, choose_layout, layers_of
from sparton.models.lora import Lora, add_adapters, freeze, merged, save_adapter
from sparton.models.origin import Origin
from sparton.models.repository import Source
from sparton.products import as_before
from sparton.types import TokenBatch

Config = TypeVar("Config", bound=PreTrainedConfig)

UNLIMITED = 2**31 - 1  # positions
ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")


class EncoderBody(nn.Module):
    """A body of transformers, of an encoder or a causal language model, on packed tokens.

    What an encoder asks of a backbone is here and, with a language-modelling head, in
    :class:`~sparton.models.backbone.Backbone`; how the body runs is its
    :class:`~sparton.models.layouts.Layout`.

    Args:
        model: a model of ``AutoModel``; its attention dropout must be 0
            (:func:`without_attention_dropout` before it is built), hidden dropout may stay.
        tokenizer: its fast tokenizer.
        compile: run the model's layers through ``torch.compile(dynamic=True)``. They share one
            graph for all lengths; evaluation and training get one each, and so do batches with
            ``TokenBatch.keys``. Dropout then is a
            :class:`~sparton.models.elementwise.FusedDropout`.
        half_residual: keep what layers pass on in bfloat16 too under bfloat16 autocast, see
            :class:`~sparton.models.elementwise.HalfLayerNorm`.
        gradient_checkpointing: recompute each layer in the backward pass.
        lora: settings of :class:`~sparton.models.lora.Lora` by name, for adapters that learn in the
            place of the weights; None for none.
        layout: how the body runs; None for the best that it can.

    Attributes:
        base: where the model is that adapters belong to; None where no file has its weights as
            they are here. Whoever loads them says it.

    Raises:
        ValueError: the body runs in no layout, or model and tokenizer do not fit, or settings of
            ``lora`` that cannot be.
    """

    origin = Origin()  # of the weights; whoever loads them says it
    base: Source | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        compile: bool = False,
        half_residual: bool = False,
        gradient_checkpointing: bool = False,
        lora: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> None:
        super().__init__()
        self.lora = None if lora is None else Lora.of(lora)
        self.model = model
        self.tokenizer = tokenizer
        first_position, self.max_length = _positions(model)
        self._check_vocabulary()
        _check_dropout(model.config)
        self.layout = layout or choose_layout(
            model, len(tokenizer), self.max_length, first_position
        )
        if self.layout.packed:
            fuse_layers(model, checkpointed=gradient_checkpointing)
        if self.lora is not None:
            add_adapters(model, self.lora)
            freeze(model, self.lora)
        if gradient_checkpointing:
            kept = {} if compile else {"context_fn": as_before}  # compiled graphs keep no weights
            # What transformers calls it from 5.23 on, warning of the name that it had before.
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False, **kept})
        if half_residual:
            replace_layer_norms(model)
        if compile:
            replace_dropout(model)
            _compile_parts(self._base)

    def hidden_states(self, tokens: TokenBatch) -> Tensor:
        """The last states ``[T, D]`` of packed tokens, as ``AutoModel`` gives them.

        Raises:
            ValueError: ``tokens.max_seqlen`` exceeds ``max_length``.
        """
        if tokens.max_seqlen > self.max_length:
            raise ValueError(
                f"a sequence of up to {tokens.max_seqlen} tokens, but {type(self.model).__name__} "
                f"has {self.max_length} positions: tokenise with a smaller maximum length"
            )
        if tokens.num_tokens == 0:  # the layers run in any case, as those of other ranks wait
            return self.layout.states(self._base, _one_token(tokens))[:0]
        return self.layout.states(self._base, tokens)

    def in_one_pass(
        self, states: Callable[[TokenBatch], Tensor], queries: TokenBatch, documents: TokenBatch
    ) -> tuple[Tensor, Tensor]:
        """What ``states``, a method of this body, makes of queries and documents, ``[Tq, D]`` and
        ``[Td, D]``, from one pass: fewer and larger matrix products. Where queries would be padded
        to the documents' length, from two passes: without a packed attention kernel, which a CPU
        has not, nor one with keys, and in layouts that are not packed."""
        packed = self.layout.packed and queries.input_ids.is_cuda
        if queries.keys or documents.keys or not packed:
            return states(queries), states(documents)
        both = states(TokenBatch.concatenate([queries, documents]))
        of_queries, of_documents = both.split([queries.num_tokens, documents.num_tokens])
        return of_queries, of_documents

    def bare(self) -> "EncoderBody":
        """The body alone, with the same parameters: itself."""
        return self

    def add_tokens(self, tokens: Sequence[str]) -> None:
        """Make the tokenizer know these strings as tokens of their own, and give those that have
        no embedding one near the mean of all. Text is searched for them as it stands, before it is
        normalised.

        Raises:
            ValueError: the vocabulary cannot grow, see :attr:`grows`; nothing has been changed.
        """
        if not self.grows:
            self._refuse_growth(tokens)
        known = self.tokenizer.get_added_vocab()
        new = [
            AddedToken(token, special=True, normalized=False)
            for token in tokens
            if token not in known
        ]
        self.tokenizer.add_tokens(new, special_tokens=True)
        words, rows = len(self.tokenizer), self.num_embeddings
        if words > rows:
            self._resize(words)
            _start_near_mean(self._embeddings().weight, rows)

    def save(self, folder: Path) -> None:
        """Write model and tokenizer as Hugging Face has them, with adapters as a part of the
        weights; or the adapters alone, as peft has them, where ``lora.save`` says so.

        Raises:
            ValueError: see :meth:`need_base`.
        """
        if self.lora is not None and self.saves_adapters_alone:
            save_adapter(self.model, self.lora, self.need_base(), folder)
        else:
            model = self.model if self.lora is None else merged(self.model)
            model.save_pretrained(folder, state_dict=_every_weight(model))
        self.tokenizer.save_pretrained(folder)

    @property
    def saves_adapters_alone(self) -> bool:
        """Whether :meth:`save` leaves the weights of the model out."""
        return self.lora is not None and self.lora.save == "adapter"

    def need_base(self) -> Source:
        """The model that adapters saved alone belong to, ``base``.

        Raises:
            ValueError: it is None, so that adapters alone would belong to no model.
        """
        if self.base is None:
            raise ArgumentError(
                "{lora} saves adapters alone, and the weights that they belong to are in no folder "
                "and not on the hub: they are random, or were changed after they were read (tokens "
                "that were added, a rescaled head). Save them merged",
                lora=self.lora and self.lora._asdict(),
            )
        return self.base

    @property
    def hidden_size(self) -> int:
        """D, the width of the hidden states."""
        return self.model.config.hidden_size

    @property
    def num_embeddings(self) -> int:
        """Rows of the table of embeddings; it may have more than the tokenizer has tokens."""
        return self._embeddings().weight.shape[0]

    def flops_per_token(self, sequence_length: float, *, training: bool = True) -> float:
        """Model FLOPs per real token; recomputation is not counted.

        Forward: 2 per weight of every linear layer (embedding tables are look-ups), 4 D S for the
        scores and the mixing of each attention layer (D the width of all its heads, S capped by the
        window ``2 w + 1`` of local layers), half of it where attention is causal. Training adds
        twice the forward; once for frozen weights, which need no gradient of their own.

        Args:
            sequence_length: mean number of tokens S of a sequence.
            training: count the backward pass too.
        """
        linears = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        matrices = 2.0 * sum(linear.weight.numel() for linear in linears)
        frozen = 2.0 * sum(
            linear.weight.numel() for linear in linears if not linear.weight.requires_grad
        )
        windows = [
            2.0 * window - 1
            for module in self.model.modules()
            if isinstance(window := getattr(module, "sliding_window", None), int)
        ]
        config = self.model.config
        windows += [float("inf")] * (config.num_hidden_layers - len(windows))
        spans = sum(min(sequence_length, window) for window in windows)
        head_width = getattr(config, "head_dim", None)
        width = config.num_attention_heads * head_width if head_width else self.hidden_size
        forward = matrices + 4.0 * width * spans * (0.5 if self.is_causal else 1.0)
        return 3.0 * forward - frozen if training else forward

    @property
    def _base(self) -> PreTrainedModel:
        base = self.model.base_model
        assert isinstance(base, PreTrainedModel)
        return base

    @property
    def is_causal(self) -> bool:
        """Whether a token attends to those before it and itself alone."""
        layers = (getattr(part, "is_causal", False) for part in self.model.modules())
        return bool(getattr(self.model.config, "is_causal", True) and any(layers))

    def _embeddings(self) -> nn.Embedding:
        try:
            table = self.model.get_input_embeddings()
        except (NotImplementedError, AttributeError):
            table = None
        if not isinstance(table, nn.Embedding):
            raise ValueError(
                f"{type(self.model).__name__} does not say where its embeddings of tokens are, or "
                "has them in a class of its own: choose another model"
            )
        return table

    @property
    def grows(self) -> bool:
        """Whether there can be more tokens than rows of embeddings."""
        return True

    def _refuse_growth(self, tokens: Sequence[str]) -> None:
        new = set(tokens) - self.tokenizer.get_vocab().keys()
        if len(self.tokenizer) + len(new) > self.num_embeddings:
            raise ValueError(
                f"the vocabulary of {type(self.model).__name__} cannot grow, because its head "
                f"holds the decoder in a form of its own: use {self.num_embeddings} tokens at most"
            )

    def _resize(self, rows: int) -> None:
        self.model.resize_token_embeddings(rows, mean_resizing=False)
        self.base = None

    def _check_vocabulary(self) -> None:
        words, rows = len(self.tokenizer), self.num_embeddings
        if words > rows:
            raise ValueError(
                f"the tokenizer has {words} tokens, the model only {rows} vocabulary rows: "
                "they belong to different models, or the embeddings were not resized"
            )


def without_attention_dropout(config: Config) -> Config:
    """Set the attention dropout of a configuration to 0, in place; returns it."""
    for name in ATTENTION_DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


def _every_weight(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """What to save of a model whose decoder is not tied: a weight under each of its names, of which
    transformers would write one and miss the others; None where it is tied."""
    if getattr(model.config, "tie_word_embeddings", True):
        return None
    seen: set[int] = set()
    weights = {}
    for name, value in model.state_dict().items():
        # A file has no two names for one place in memory.
        weights[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return weights


def _one_token(like: TokenBatch) -> TokenBatch:
    """A single token, on the device of a batch."""
    return TokenBatch.from_lists([[0]]).to(like.input_ids.device)


def _compile_parts(model: PreTrainedModel) -> None:
    """Each layer by itself: equal ones share a graph, which takes a fraction of the time that a
    graph of all layers takes."""
    layers = layers_of(model)
    parts = layers or [model]
    for child in model.children() if layers else ():
        inside = list(child.modules())[1:]
        # A single norm is not worth a graph.
        if len(inside) > 1 and not any(part in layers for part in inside):
            parts.append(child)
    for part in parts:
        compile_part(part)


def compile_part(part: nn.Module) -> None:
    """``part.compile``, for sequences of any length."""
    # Row and column sums of LayerNorm's gradient in one kernel need more registers than there are:
    # on an H200 that kernel takes nine times as long as two do.
    part.compile(dynamic=True, options={"triton.mix_order_reduction": False})


def _check_dropout(config: PreTrainedConfig) -> None:
    for name in ATTENTION_DROPOUTS:
        if getattr(config, name, 0.0):
            raise ValueError(
                f"config.{name} is {getattr(config, name)}; packed attention has no dropout: "
                "build the model from without_attention_dropout(config)"
            )


def _positions(model: PreTrainedModel) -> tuple[int, int]:
    """First position id, and the number of positions a sequence may use.

    The RoBERTa family reserves the ids up to its padding index, and shows it by giving the table
    of positions a padding index.
    """
    tables = (
        module
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    )
    padding = next((table.padding_idx for table in tables), None)
    offset = 0 if padding is None else padding + 1
    # Models whose attention falls off with the distance, or that remember, have no last position.
    return offset, getattr(model.config, "max_position_embeddings", UNLIMITED) - offset


@torch.no_grad()
def _start_near_mean(weight: Tensor, first: int) -> None:
    """Rows from ``first`` on: the mean of those before, with noise of their spread."""
    old = weight[:first].float()
    weight[first:] = old.mean(0) + old.std() * torch.randn_like(weight[first:])
