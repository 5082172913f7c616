"""How packed tokens pass through a body of transformers: as one row, padded, or length by length.

T packed tokens, N sequences, S the longest of them, D hidden width.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from sparton import packing
from sparton.models.attention import (
    DROPLESS_ATTENTION,
    PACKED_ATTENTION,
    register_packed_attention,
)
from sparton.models.causal_lm import is_causal_lm
from sparton.types import TokenBatch

logger = logging.getLogger(__name__)

# Two sequences of unequal length that tell whether a layout keeps them apart.
_SHORT, _LONG = (5, 6, 7), (8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 11)


class Layout(Protocol):
    """How a body runs on a packed batch.

    Attributes:
        name: for logs.
        packed: whether the body sees no padding, so that batches of unequal lengths cost no more
            than their tokens.
    """

    name: str
    packed: bool

    def states(self, body: nn.Module, tokens: TokenBatch) -> Tensor:
        """Last states ``[T, D]`` of at least one token."""
        ...


class PackedLayout:
    """All tokens in one row; attention finds the boundaries of the sequences.

    Args:
        first_position: id of a sequence's first position.
    """

    name, packed = "packed", True

    def __init__(self, first_position: int) -> None:
        self.first_position = first_position

    def states(self, body: nn.Module, tokens: TokenBatch) -> Tensor:
        keys = tokens.keys
        output = body(
            input_ids=tokens.input_ids[None],
            position_ids=tokens.position_ids[None] + self.first_position,
            cu_seq_lens_q=tokens.cu_seqlens,
            cu_seq_lens_k=tokens.cu_seqlens if keys is None else keys.cu_seqlens,
            max_length_q=tokens.max_seqlen,
            max_length_k=tokens.max_seqlen if keys is None else keys.max_seqlen,
            key_rows=None if keys is None else keys.rows,
        )
        return output.last_hidden_state.squeeze(0)


class PaddedLayout:
    """A padded batch with an attention mask, for bodies with an attention of their own.

    Args:
        padding: id of the token that fills sequences up.
    """

    name, packed = "padded", False

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def states(self, body: nn.Module, tokens: TokenBatch) -> Tensor:
        seen = tokens.pad(_attended(tokens))
        # Attention over nothing would be NaN, and its gradient would reach the parameters.
        seen[:, 0] |= ~seen.any(dim=1)
        padded = tokens.pad(tokens.input_ids, fill=self.padding)
        states = body(input_ids=padded, attention_mask=seen.long()).last_hidden_state
        return packing.unpad(states, tokens.cu_seqlens, tokens.num_tokens)


class UniformLayout:
    """Sequences of one length at a time, for bodies that mix padding into the text in spite of an
    attention mask, such as those that convolve. The lengths are read on the host."""

    name, packed = "one length at a time", False

    def states(self, body: nn.Module, tokens: TokenBatch) -> Tensor:
        attended = _attended(tokens)
        lengths = tokens.cu_seqlens.diff()
        rows, parts = [], []
        for length in lengths[lengths > 0].unique().tolist():
            starts = tokens.cu_seqlens[:-1][lengths == length]
            places = starts[:, None] + torch.arange(length, device=starts.device)
            output = body(
                input_ids=tokens.input_ids[places], attention_mask=attended[places].long()
            )
            rows.append(places.flatten())
            parts.append(output.last_hidden_state.flatten(0, 1))
        order = torch.cat(rows)
        states = torch.cat(parts)
        return torch.empty_like(states).index_copy(0, order, states)


# What a body raises that wants or gives other arguments or shapes.
CANNOT_RUN = (TypeError, AttributeError, ValueError, RuntimeError)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of the bodies below a module, a layer before those within it."""
    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


@torch.no_grad()
def choose_layout(
    model: PreTrainedModel, words: int, positions: int, first_position: int = 0
) -> Layout:
    """The best layout in which the body gives every sequence the states that it has alone.

    A body whose code ignores the attention interface or the position ids would silently mix
    sequences, one that ignores the attention mask would mix in padding: both are tried here, on
    two tiny sequences. A model that runs packed has :data:`PACKED_ATTENTION` afterwards.

    Args:
        model: a body, or a model with one, as transformers builds it or as this function left it.
        words: token ids below this are in the vocabulary.
        positions: tokens that a sequence may have.
        first_position: id of a sequence's first position, for the packed layout.

    Raises:
        ValueError: an encoder-decoder, a body that gives no states of a text alone, that in no
            layout repeats them, or that does not attend as its configuration says.
    """
    packed = PackedLayout(first_position)
    if model.config._attn_implementation in (PACKED_ATTENTION, DROPLESS_ATTENTION):
        return packed
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{kind} is an encoder with a decoder; choose an encoder without one")
    sequences = [[token % words for token in tokens[:positions]] for tokens in (_SHORT, _LONG)]
    device = next(model.parameters()).device
    tokens = TokenBatch.from_lists(sequences).to(device)
    padding = getattr(model.config, "pad_token_id", None)
    others: list[Layout] = [PaddedLayout(0 if padding is None else padding), UniformLayout()]
    with _evaluating(model) as body, _in_fp32(body):
        alone = [torch.tensor([ids], device=device) for ids in sequences]
        try:
            expected = torch.cat([body(input_ids=ids).last_hidden_state[0] for ids in alone])
        except torch.OutOfMemoryError:
            raise
        except CANNOT_RUN as error:
            raise ValueError(
                f"{kind} cannot run on a text by itself ({type(error).__name__}: {error}): choose "
                "another model"
            ) from error
        own_attention = model.config._attn_implementation
        register_packed_attention()
        model.set_attn_implementation(PACKED_ATTENTION)
        if _repeats(packed, body, tokens, expected):
            logger.info(f"{kind} runs on {packed.name} tokens")
            _check_direction(packed, body, tokens)
            return packed
        model.set_attn_implementation(own_attention)
        for layout in others:
            if _repeats(layout, body, tokens, expected):
                logger.info(f"{kind} cannot run on packed tokens; it runs {layout.name}")
                _check_direction(layout, body, tokens)
                return layout
    raise ValueError(
        f"{kind} gives a sequence other states among others than alone, packed, padded and among "
        "those of its own length: it draws random numbers, or reads more than the tokens"
    )


def _attended(tokens: TokenBatch) -> Tensor:
    """Whether a token is attended to: bool ``[T]``."""
    if tokens.keys is None:
        return torch.ones_like(tokens.input_ids, dtype=torch.bool)
    return torch.zeros_like(tokens.input_ids, dtype=torch.bool).index_fill(
        0, tokens.keys.rows, True
    )


def _repeats(layout: Layout, body: nn.Module, tokens: TokenBatch, expected: Tensor) -> bool:
    try:
        states = layout.states(body, tokens)
    except torch.OutOfMemoryError:
        raise
    except CANNOT_RUN:
        return False
    return _are_close(states, expected)


def _are_close(states: Tensor, expected: Tensor) -> bool:
    # Rounding differs between batches, by more where products are in TF32.
    return bool((states - expected).norm() <= 1e-3 * expected.norm())


def _check_direction(layout: Layout, body: Any, tokens: TokenBatch) -> None:
    """Refuse a body whose code passes over what its configuration says of the tokens behind one,
    as those that remember in place of attending do, and some that attend."""
    causal = getattr(body.config, "is_causal", None)
    if causal is None or not is_causal_lm(body.config):
        return
    changed = tokens.input_ids.clone()
    last = tokens.cu_seqlens[1:].long() - 1
    changed[last] = changed[last] - 1
    before = torch.ones_like(changed, dtype=torch.bool).index_fill(0, last, False)
    states, others = (
        layout.states(body, tokens._replace(input_ids=ids))[before]
        for ids in (tokens.input_ids, changed)
    )
    kind = type(body).__name__
    if not causal and torch.equal(states, others):
        raise ValueError(
            f"{kind} is to be bidirectional, but what it makes of a token does not depend on those "
            "behind it, whatever its configuration says: load it with attention='causal'"
        )
    if causal and not _are_close(states, others):
        raise ValueError(
            f"{kind} is to be causal, but what it makes of a token depends on those behind it, "
            "whatever its configuration says: load it with attention='bidirectional'"
        )


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[Any]:
    """The body of a model in evaluation mode; a body may come here compiled already."""
    training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"), without_warnings():
            yield model.base_model
    finally:
        model.train(training)


@contextmanager
def _in_fp32(body: nn.Module) -> Iterator[None]:
    """Weights are in fp32, those of a layer while it runs: in 16 bits, tens of layers would round
    two batches apart by as much as some faults do, and a large model may not be there twice."""
    layers = layers_of(body)
    inside = {weight for layer in layers for weight in layer.parameters()}
    outside = [weight for weight in body.parameters() if weight not in inside]
    given: dict[nn.Module, list[Tensor]] = {}

    def widen(layer: nn.Module, _: Any) -> None:
        given[layer] = _widened(layer.parameters())

    def restore(layer: nn.Module, *_: Any) -> None:
        _set(layer.parameters(), given.pop(layer))

    hooks = [layer.register_forward_pre_hook(widen) for layer in layers]
    hooks += [layer.register_forward_hook(restore, always_call=True) for layer in layers]
    before = _widened(outside)
    try:
        yield
    finally:
        _set(outside, before)
        for hook in hooks:
            hook.remove()


def _widened(weights: Iterable[nn.Parameter]) -> list[Tensor]:
    """Turn weights of 16 bits into fp32; what they were."""
    before = []
    for weight in weights:
        before.append(weight.data)
        if weight.dtype.itemsize < torch.float32.itemsize:
            weight.data = weight.data.float()
    return before


def _set(weights: Iterable[nn.Parameter], values: Iterable[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.data = value


@contextmanager
def without_warnings() -> Iterator[None]:
    """transformers says nothing inside."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
