"""A Hugging Face language model as a producer of packed hidden states.

T packed tokens, N sequences, S a sequence's length, D hidden width, V vocabulary.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutputWithPast

from sparton.models.body import EncoderBody, compile_part
from sparton.models.checkpoint import save_logit_bias
from sparton.models.layouts import CANNOT_RUN
from sparton.models.lora import freeze
from sparton.models.output_embeddings import Decoder, find_decoder, linear_of
from sparton.types import BodyOptions, TokenBatch


class Backbone(EncoderBody):
    """A masked or causal language model without its last matrix, on packed tokens.

    The decoder (output embeddings) leaves the Hugging Face model and becomes ``decoder``; what
    the model then calls logits are the transformed hidden states that the decoder would read. A
    decoder tied to the input embeddings stays tied until :meth:`untie`.

    Args:
        mlm: a model of ``AutoModelForMaskedLM`` or ``AutoModelForCausalLM``; its attention dropout
            must be 0 (:func:`~sparton.models.body.without_attention_dropout` before it is built),
            hidden dropout may stay.
        tokenizer: its fast tokenizer.
        logit_bias: fp32 ``[V]``, see :meth:`add_logit_bias`.
        options: see :class:`EncoderBody`. Compiled, :meth:`transform` is one graph. Beside adapters
            the decoder is frozen, too.

    Raises:
        ValueError: no decoder is found, the body runs in no layout, or model and tokenizer do not
            fit.
    """

    decoder: Decoder

    def __init__(
        self,
        mlm: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        logit_bias: Tensor | None = None,
        **options: Unpack[BodyOptions],
    ) -> None:
        place = find_decoder(mlm)
        place.remove()  # before adapters come, of which it gets none
        super().__init__(mlm, tokenizer, **options)
        self.decoder = place.decoder
        if self.lora is not None:
            freeze(self.decoder, self.lora)
        self._place = place
        # In a tuple, lest it be registered beside the model, whose parameters it shares.
        self._head = (_without_body(mlm),)
        if logit_bias is not None:
            self.add_logit_bias(logit_bias)
        self._try_head()
        if options.get("compile"):
            compile_part(self._head[0])

    def forward(self, tokens: TokenBatch) -> Tensor:
        """Transformed hidden states ``[T, D]`` of packed tokens; ``decoder`` maps them to V.

        Raises:
            ValueError: ``tokens.max_seqlen`` exceeds ``max_length``.
        """
        return self.transform(self.hidden_states(tokens))

    def transform(self, hidden: Tensor) -> Tensor:
        """What the masked-LM head makes of last states ``[T, D]``, as :meth:`forward` gives it."""
        if hidden.shape[0] == 0:
            return hidden[:, :1].expand(-1, self.decoder.weight.shape[1])
        return self._head[0](inputs_embeds=hidden[None]).logits.squeeze(0)

    @torch.no_grad()
    def _try_head(self) -> None:
        """Refuse a model whose head does not run without its body, or does not end in the
        decoder."""
        weight = self._embeddings().weight
        states = weight.new_zeros(1, self.hidden_size)
        device, mixed = weight.device.type, self.lora is not None
        generators = [weight.device] if device == "cuda" else []
        with (
            torch.random.fork_rng(devices=generators),
            # What is cast here must not outlive a change of the weights in an outer block.
            torch.autocast(device, torch.bfloat16, enabled=mixed, cache_enabled=False),
        ):
            try:
                width = self.transform(states).shape[-1]
                fits = width == self.decoder.weight.shape[1]
                found = f"it gives {width} numbers for a token, not {self.decoder.weight.shape[1]}"
            except CANNOT_RUN as error:
                fits, found = False, f"{type(error).__name__}: {error}"
        if not fits:
            raise ValueError(
                f"the head of {type(self.model).__name__} does not run in front of its decoder "
                f"({found}): choose another model"
            )

    def bare(self) -> EncoderBody:
        """The body alone, with the same parameters, without the masked-LM head."""
        body = EncoderBody(self._base, self.tokenizer, layout=self.layout).train(self.training)
        body.lora, body.base = self.lora, self.base
        return body

    def save(self, folder: Path) -> None:
        """See :meth:`EncoderBody.save <sparton.models.body.EncoderBody.save>`."""
        with self.decoder_in_place():
            super().save(folder)
        save_logit_bias(self.logit_bias, folder)

    @property
    def logit_bias(self) -> Tensor | None:
        """The decoder's bias where transformers' model has no place for it, as Llama; else None."""
        place = self._place
        has_place = not isinstance(place.whole, nn.Linear) or place.whole.bias is not None
        return None if has_place else self.decoder.bias

    def add_logit_bias(self, bias: Tensor) -> None:
        """Give a decoder that has no bias this one ``[V]``, to be learned. Transformers' own model
        does not get it; :meth:`save` writes it beside the checkpoint.

        Raises:
            ValueError: the decoder has a bias, or another number of rows.
        """
        rows, kind = self.decoder.out_features, type(self.model).__name__
        if self.decoder.bias is not None:
            raise ValueError(f"the decoder of {kind} has a bias of its own")
        if bias.shape != (rows,):
            raise ValueError(
                f"{kind} has {rows} vocabulary rows, and the bias of its logits {len(bias)} numbers"
            )
        weight = self.decoder.weight
        dtype = weight.dtype if self.lora is None else torch.float32  # as those of frozen layers
        bias = bias.to(weight.device, dtype)
        self.decoder = linear_of(weight, nn.Parameter(bias, requires_grad=weight.requires_grad))
        self._place = self._place._replace(decoder=self.decoder)

    def need_bias(self) -> Tensor:
        """The decoder's bias ``[V]``; where it has none, zeros are added."""
        if self.decoder.bias is None:
            self.add_logit_bias(self.decoder.weight.new_zeros(self.decoder.out_features))
        bias = self.decoder.bias
        assert isinstance(bias, Tensor)
        return bias

    @torch.no_grad()
    def set_bias(self, terms: list[int], value: float) -> None:
        """Give some terms this bias, of which adapters that are saved alone would know nothing."""
        bias = self.need_bias()
        if (bias[terms] != value).any():
            bias[terms] = value
            self.base = None

    def untie(self) -> None:
        """Give a decoder that is tied to the embeddings a matrix of its own, which the
        configuration then says; any other stays.

        Raises:
            ValueError: the head holds its decoder in a form of its own, or has two names for its
                bias, as BERT's.
        """
        place = self._place
        kind, shared = type(self.model).__name__, self._embeddings().weight
        if not isinstance(place.whole, nn.Linear):
            raise ValueError(f"the head of {kind} holds its decoder in a form of its own")
        assert isinstance(self.decoder, nn.Linear)
        if self.decoder.weight is not shared:
            return
        if len(self.model.all_tied_weights_keys) > 1:  # its configuration knows all or none
            raise ValueError(f"the head of {kind} has more than its decoder in two places")
        own = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
        self.decoder.weight = place.whole.weight = own
        self.model.config.tie_word_embeddings = False
        self.model.all_tied_weights_keys = self.model.get_expanded_tied_weights_keys()

    @contextmanager
    def decoder_in_place(self) -> Iterator[PreTrainedModel]:
        """The complete Hugging Face model, for saving; the encoder cannot run meanwhile."""
        place = self._place
        place.restore()
        try:
            yield self.model
        finally:
            place.remove()

    def flops_per_token(self, sequence_length: float, *, training: bool = True) -> float:
        """Model FLOPs per real token, decoder and maximum included.

        To those of :meth:`EncoderBody.flops_per_token` comes the decoder: 2 D V, and in training
        4 D V / S, because through the maximum each vocabulary entry of a sequence has a gradient
        at one token only; half of it where the decoder is frozen.
        """
        body = super().flops_per_token(sequence_length, training=training)
        decoder = 2.0 * self.decoder.weight.numel()
        gradients = 2.0 if self.decoder.weight.requires_grad else 1.0
        return body + decoder + (gradients * decoder / sequence_length if training else 0.0)

    @property
    def grows(self) -> bool:
        """Not where the head holds its decoder in a form of its own."""
        return isinstance(self._place.whole, nn.Linear)

    @torch.no_grad()
    def _resize(self, rows: int) -> None:
        """New rows of the decoder's bias start at the mean of the others."""
        old, logit_bias, place = self.decoder.out_features, self.logit_bias, self._place
        bias = None if self.decoder.bias is None else self.decoder.bias.detach().clone()
        place.restore()
        super()._resize(rows)
        place = find_decoder(self.model)
        self.decoder, self._place = place.decoder, place
        place.remove()
        if logit_bias is not None:
            self.add_logit_bias(nn.functional.pad(logit_bias, (0, rows - old)))
        if self.decoder.bias is not None and bias is not None:
            # In its own dtype: that of frozen layers is not that of their weights.
            self.decoder.bias.data = self.decoder.bias.data.to(bias.dtype)
            self.decoder.bias[:old], self.decoder.bias[old:] = bias, bias.mean()


class _Output(BaseModelOutputWithPast):
    """What heads look for in the result of a body; all but the states is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _GivenStates(nn.Module):
    """Stands where a model's body was: its last states are the embeddings that it is given."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embeddings = getattr(body, "embeddings", None)  # some heads are handed them

    @property
    def decoder(self) -> "_GivenStates":
        """Itself: some models go to the inner body at once."""
        return self

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def _without_body(mlm: PreTrainedModel) -> PreTrainedModel:
    """The same model, its modules and parameters shared, with the body left out."""
    head = copy.copy(mlm)
    head._modules = {**mlm._modules, mlm.base_model_prefix: _GivenStates(mlm.base_model)}
    return head
