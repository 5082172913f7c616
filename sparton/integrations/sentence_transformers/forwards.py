"""What takes the place of methods in the modules of sentence-transformers.

T packed tokens, N texts, S tokens of the longest, D hidden width, V vocabulary.

Modules stay what they are, so that nothing changes about a saved folder: each instance is given a
callable, which ``nn.Module`` finds before the method of the class.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparton import packing
from sparton.integrations.sentence_transformers.twin import Twin
from sparton.kernels.splade_head import splade_head
from sparton.models.backbone import Backbone
from sparton.models.output_embeddings import Decoder
from sparton.packing import Packed
from sparton.types import TokenBatch, TokenRows

Features = dict[str, Any]

# Where a transformer leaves for SpladePooling what stock modules have no place for.
_PENDING = "sparton_pending"
# What sentence-transformers calls the boundaries of texts that it laid end to end by itself.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_OF_PACKED_TOKENS = (*_BOUNDARIES, "seq_idx", "position_ids")
_OF_PADDED_TOKENS = ("input_ids", "token_type_ids")
_EXPANSION = "query_expansion_positions"


class _Pending(NamedTuple):
    """Transformed states ``[T, D]`` that the decoder reads, their tokens, and the decoder."""

    states: Tensor
    tokens: TokenBatch
    decoder: Decoder


class Replacement:
    """A callable in the place of a method.

    Args:
        module: whose method it is.
    """

    def __init__(self, module: Any) -> None:
        self.module = module


class PackedPreprocess(Replacement):
    """``Transformer.preprocess`` whose texts come laid end to end, as sentence-transformers does it
    for FlashAttention. On the host, where the number of tokens is known. The mask of the padded
    batch stays beside them for those who count tokens, such as the model card.

    Queries that are expanded stay padded, and so does everything with ``unpad_inputs=False``.
    """

    def __call__(self, *inputs: Any, **options: Any) -> Features:
        """What the stock method returns, packed.

        Raises:
            ValueError: pairs of texts as one input, which packed tokens do not tell apart.
        """
        features = type(self.module).preprocess(self.module, *inputs, **options)
        mask = features.get("attention_mask")
        if self.module.unpad_inputs is False or mask is None or _EXPANSION in features:
            return features
        _check_token_types(features)
        packed = packing.pack(features["input_ids"], mask)
        bounds, longest = packed.cu_seqlens, packed.max_seqlen
        rest = {name: value for name, value in features.items() if name not in _OF_PADDED_TOKENS}
        boundaries = dict(zip(_BOUNDARIES, (bounds, bounds, longest, longest), strict=True))
        return {"input_ids": packed.values[None], **boundaries, **rest}


class PackedTransformer(Replacement):
    """``Transformer.forward`` on packed tokens, over the parameters of the model that it holds.

    Texts may come laid end to end, and then nothing waits for the device; or padded, when the
    number of their tokens is asked for. Without gradients, hidden states are padded in either case:
    ``encode`` may be asked for those of each text.

    Raises:
        ValueError: see :class:`~sparton.integrations.sentence_transformers.twin.Twin`.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._twin: Twin | None = self._make_twin()

    def __call__(self, features: Features, **_: Any) -> Features:
        """Hidden states in the form in which the texts came, or padded; for SpladePooling, what it
        needs."""
        self._twin = self._twin or self._make_twin()
        body = self._twin.body
        tokens, padded = self._tokens(features)
        _check_device(tokens.input_ids, self.module)
        if isinstance(body, Backbone):
            features[_PENDING] = _Pending(body(tokens), tokens, body.decoder)
            return features
        states = body.hidden_states(tokens)
        if padded is not None:
            states = packing.unpack(padded._replace(values=states))
        else:
            states = states[None]
        name = self.module.module_output_name
        features[name] = states
        if padded is None and not torch.is_grad_enabled():
            _pad_again(features, name)
        return features

    def _tokens(self, features: Features) -> tuple[TokenBatch, Packed | None]:
        """The texts, and how they were padded, if they were."""
        ids = features["input_ids"]
        if "cu_seq_lens_q" in features:
            ids, bounds = ids.squeeze(0), features["cu_seq_lens_q"].int()
            return _batch(ids, bounds, features["max_length_q"]), None
        _check_token_types(features)
        attended = features.get("attention_mask", torch.ones_like(ids))
        positions = features.get(_EXPANSION)
        if positions is None:
            packed = packing.pack(ids, attended)
            return _batch(*packed[:3]), packed
        expansion = self.module.query_expansion
        # Below that length every place that is not a query's own is one of its expansion.
        total = ids.numel() if ids.shape[1] <= expansion["length"] else None
        seen = packing.boolean_mask(attended, "attention_mask") | positions
        packed = packing.pack(ids, seen, total=total)
        tokens = _batch(*packed[:3])
        if expansion["attend"]:
            return tokens, packed
        own = packing.pack(ids, attended)
        keys = torch.searchsorted(packed.slots, own.slots)
        return tokens._replace(keys=TokenRows(keys, own.cu_seqlens, own.max_seqlen)), packed

    def _make_twin(self) -> Twin:
        head = self.module.transformer_task == "fill-mask"
        return Twin(self.module.model, self.module.tokenizer, head=head)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "_twin": None}


class FusedSpladePooling(Replacement):
    """``SpladePooling.forward`` without logits: the fused head reads what the transformer left."""

    def __call__(self, features: Features) -> Features:
        """The representations ``[N, V]``, in the dtype that the stock module has in training."""
        states, tokens, decoder = features.pop(_PENDING)
        representations = splade_head(
            states,
            decoder.weight,
            decoder.bias,
            tokens.cu_seqlens,
            pooling=self.module.pooling_strategy,
            activation=self.module.activation_function,
        )
        if not torch.is_autocast_enabled(states.device.type):
            representations = representations.to(states.dtype)
        if self.module.embedding_dimension is None:
            self.module.embedding_dimension = representations.shape[1]
        features["sentence_embedding"] = representations
        return features


class PaddedMask(Replacement):
    """``MultiVectorMask.forward`` that pads packed tokens again without waiting for the device."""

    def __call__(self, features: Features, task: str | None = None) -> Features:
        """What the stock module makes of the padded batch."""
        if "cu_seq_lens_q" in features:
            _pad_again(features, "token_embeddings")
        return type(self.module).forward(self.module, features, task=task)


def _pad_again(features: Features, output: str) -> None:
    """Give packed tokens, their states and their mask the form that stock modules give them."""
    bounds, longest = features["cu_seq_lens_q"], features["max_length_q"]
    for name in (output, "input_ids"):
        features[name] = packing.pad(features[name].squeeze(0), bounds, longest)
    features["attention_mask"] = packing.padding_mask(bounds, longest).long()
    for name in _OF_PACKED_TOKENS:
        features.pop(name, None)


def _batch(ids: Tensor, cu_seqlens: Tensor, longest: int) -> TokenBatch:
    places = packing.positions(cu_seqlens, ids.shape[0])
    return TokenBatch(ids, places, cu_seqlens, longest)


def _check_token_types(features: Features) -> None:
    types = features.get("token_type_ids")
    if types is not None and bool(types.any()):
        raise ValueError(
            "a fused model takes one text as an input, not a pair: packed tokens are all of type 0"
        )


def _check_device(ids: Tensor, module: Any) -> None:
    device = next(module.parameters()).device
    if ids.device != device:
        raise ValueError(
            f"the texts are on {ids.device} and the model on {device}; a fused model cannot be "
            "replicated by nn.DataParallel: train on several GPUs with torchrun or accelerate"
        )
