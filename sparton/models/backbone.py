"""A Hugging Face masked-language model as a producer of packed hidden states.

T packed tokens, N sequences, S a sequence's length, D hidden width, V vocabulary, L layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from sparton.models.attention import PACKED_ATTENTION, register_packed_attention
from sparton.types import TokenBatch

Config = TypeVar("Config", bound=PreTrainedConfig)

ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")


class Backbone(nn.Module):
    """A masked-language model without its last matrix, on packed tokens.

    The decoder (output embeddings) leaves the Hugging Face model and becomes :attr:`decoder`; what
    the model then calls logits are the transformed hidden states that the decoder would read. A
    decoder tied to the input embeddings stays tied.

    Args:
        mlm: a model of ``AutoModelForMaskedLM``; its attention dropout must be 0
            (:func:`without_attention_dropout` before it is built), hidden dropout may stay.
        tokenizer: its fast tokenizer.
        compile: run the model through ``torch.compile(dynamic=True)``. One graph serves all
            lengths; evaluation and training get one each.
        gradient_checkpointing: recompute each layer in the backward pass.

    Raises:
        ValueError: the model's attention cannot be packed, or model and tokenizer do not fit.
    """

    decoder: nn.Linear

    def __init__(
        self,
        mlm: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        compile: bool = False,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.mlm = mlm
        self.tokenizer = tokenizer
        decoder = mlm.get_output_embeddings()
        if not isinstance(decoder, nn.Linear):
            raise ValueError(f"{type(mlm).__name__} has no linear decoder; use a masked-LM model")
        self.decoder = decoder
        self._decoder_place = _place_of(decoder, mlm)
        self._remove_decoder()
        self._position_offset, self.max_length = _positions(mlm)
        self._check_vocabulary()
        _check_dropout(mlm.config)
        register_packed_attention()
        mlm.set_attn_implementation(PACKED_ATTENTION)
        _check_packing(self)
        if gradient_checkpointing:
            mlm.gradient_checkpointing_enable({"use_reentrant": False})
        if compile:
            mlm.compile(dynamic=True)

    def forward(self, tokens: TokenBatch) -> Tensor:
        """Transformed hidden states ``[T, D]`` of packed tokens; :attr:`decoder` maps them to V.

        Raises:
            ValueError: ``tokens.max_seqlen`` exceeds :attr:`max_length`.
        """
        if tokens.max_seqlen > self.max_length:
            raise ValueError(
                f"a sequence of up to {tokens.max_seqlen} tokens, but {type(self.mlm).__name__} "
                f"has {self.max_length} positions: tokenise with a smaller maximum length"
            )
        if tokens.num_tokens == 0:
            return self.decoder.weight.new_zeros(0, self.decoder.in_features)
        output = self.mlm(
            input_ids=tokens.input_ids[None],
            position_ids=tokens.position_ids[None] + self._position_offset,
            cu_seq_lens_q=tokens.cu_seqlens,
            cu_seq_lens_k=tokens.cu_seqlens,
            max_length_q=tokens.max_seqlen,
            max_length_k=tokens.max_seqlen,
        )
        return output.logits[0]

    @contextmanager
    def decoder_in_place(self) -> Iterator[PreTrainedModel]:
        """The complete Hugging Face model, for saving; inside, :meth:`forward` gives logits."""
        setattr(*self._decoder_place, self.decoder)
        try:
            yield self.mlm
        finally:
            self._remove_decoder()

    def num_parameters(self) -> int:
        """Number of parameters; a tied decoder counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, sequence_length: float, *, training: bool = True) -> float:
        """Model FLOPs per real token, decoder and maximum included; recomputation is not counted.

        Forward: 2 per weight of every linear layer (embedding tables are look-ups), 4 D S for the
        scores and the mixing of each attention layer (S capped by the window ``2 w + 1`` of local
        layers), and 2 D V for the decoder. Training adds twice the forward of all but the decoder,
        and 4 D V / S for the decoder: through the maximum each vocabulary entry of a sequence has
        a gradient at one token only.

        Args:
            sequence_length: mean number of tokens S of a sequence.
            training: count the backward pass too.
        """
        linears = [module for module in self.mlm.modules() if isinstance(module, nn.Linear)]
        matrices = 2.0 * sum(linear.weight.numel() for linear in linears)
        windows = [
            2.0 * window - 1
            for module in self.mlm.modules()
            if isinstance(window := getattr(module, "sliding_window", None), int)
        ]
        config = self.mlm.config
        windows += [float("inf")] * (config.num_hidden_layers - len(windows))
        spans = sum(min(sequence_length, window) for window in windows)
        backbone = matrices + 4.0 * config.hidden_size * spans
        decoder = 2.0 * self.decoder.weight.numel()
        if not training:
            return backbone + decoder
        return 3.0 * backbone + decoder + 2.0 * decoder / sequence_length

    def _remove_decoder(self) -> None:
        setattr(*self._decoder_place, nn.Identity())

    def _check_vocabulary(self) -> None:
        words, rows = len(self.tokenizer), self.decoder.out_features
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


def _check_dropout(config: PreTrainedConfig) -> None:
    for name in ATTENTION_DROPOUTS:
        if getattr(config, name, 0.0):
            raise ValueError(
                f"config.{name} is {getattr(config, name)}; packed attention has no dropout: "
                "build the model from without_attention_dropout(config)"
            )


def _place_of(child: nn.Module, root: nn.Module) -> tuple[nn.Module, str]:
    for parent in root.modules():
        for name, module in parent.named_children():
            if module is child:
                return parent, name
    raise ValueError(f"{type(root).__name__} does not hold its own output embeddings")


def _positions(mlm: PreTrainedModel) -> tuple[int, int]:
    """First position id, and the number of positions a sequence may use.

    The RoBERTa family reserves the ids up to its padding index, and shows it by giving the table
    of positions a padding index.
    """
    tables = (
        module
        for name, module in mlm.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    )
    padding = next((table.padding_idx for table in tables), None)
    offset = 0 if padding is None else padding + 1
    return offset, mlm.config.max_position_embeddings - offset


@torch.no_grad()
def _check_packing(backbone: Backbone) -> None:
    """Run two tiny sequences together and one of them alone; a model whose code ignores the
    attention interface or the position ids would silently mix sequences, and is refused here."""
    rows, training = backbone.decoder.out_features, backbone.training
    first, second = ([token % rows for token in tokens] for tokens in ((5, 6, 7), (8, 9, 10, 11)))
    backbone.eval()
    try:
        together = backbone(TokenBatch.from_lists([first, second]))[len(first) :]
        alone = backbone(TokenBatch.from_lists([second]))
    except (TypeError, AttributeError) as error:
        raise _unpackable(backbone.mlm) from error
    finally:
        backbone.train(training)
    if not torch.allclose(together, alone, rtol=0, atol=1e-4 * float(alone.abs().max())):
        raise _unpackable(backbone.mlm)


def _unpackable(mlm: PreTrainedModel) -> ValueError:
    return ValueError(
        f"{type(mlm).__name__} does not run on packed sequences: it ignores transformers' "
        "attention interface or position ids; BERT, DistilBERT, (XLM-)RoBERTa and ModernBERT do"
    )
