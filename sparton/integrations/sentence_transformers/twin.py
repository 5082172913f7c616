"""The structure of a Hugging Face model a second time, over the same parameters, on packed tokens.

A library that owns a model calls it with padded batches, saves it, moves it and puts adapters into
it. Its twin runs the same weights without padding and changes nothing about it: modules are copied,
while the dictionaries that hold their parameters and buffers are shared.
"""

import copy
from types import NoneType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from sparton.models.attention import DROPLESS_ATTENTION
from sparton.models.backbone import Backbone
from sparton.models.body import EncoderBody, without_attention_dropout
from sparton.sharded import is_sharded

# Types of what modules keep of their settings; others are shared with the twin, or not followed.
_PLAIN = (bool, int, float, str, tuple, list, NoneType)


class Twin:
    """A body, or a masked-language model without its last matrix, over the parameters of a model.

    It follows what happens to the model: parameters that are moved, cast or replaced, training and
    evaluation mode of every part, gradient checkpointing, adapters that come and go or are switched
    on and off, and numbers such as the rate of a dropout. It has no attention dropout, whatever the
    model's. Hooks on parts of the model run if they were there when the twin was made.

    Args:
        model: what is followed.
        tokenizer: its fast tokenizer.
        head: with the masked-language model's head, as a :class:`Backbone`.

    Raises:
        ValueError: the model cannot run on packed tokens; the message names what is in the way.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, head: bool
    ) -> None:
        self.model, self.tokenizer, self.head = model, tokenizer, head
        self._make()

    @property
    def body(self) -> EncoderBody:
        """The twin as the model is now; a :class:`Backbone` with a head."""
        modules = list(self.model.modules())
        same = len(modules) == len(self._pairs) and all(
            module is original for module, (original, _) in zip(modules, self._pairs)
        )
        if not same or _changed(self._settings):
            self._make()
        for original, twin in self._pairs:
            if twin.training != original.training:
                twin.training = original.training
        return self._body

    @torch.no_grad()
    def _make(self) -> None:
        modules = list(self.model.modules())
        _check(self.model, modules)
        copies: dict[int, Any] = {}
        twin = _copied(self.model, copies)
        checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in modules)
        kind = Backbone if self.head else EncoderBody
        device = next(self.model.parameters()).device
        with torch.autocast(device.type, enabled=False):
            self._body = kind(twin, self.tokenizer, gradient_checkpointing=checkpointed)
        if not self._body.layout.packed:
            raise ValueError(
                f"{type(self.model).__name__} cannot run on packed tokens: its attention is not "
                "called through transformers' AttentionInterface, or ignores position ids"
            )
        twin.set_attn_implementation(DROPLESS_ATTENTION)
        self._pairs = [(module, copies[id(module)]) for module in modules]
        self._settings = [(vars(module), *_settings(module)) for module in modules]


def _copied(original: Any, copies: dict[int, Any]) -> Any:
    """A module and all below it, with the parameters and buffers of the originals, but with
    configurations of its own.

    Args:
        original: a module or a configuration.
        copies: what was copied already, by the identity of its original; filled here.
    """
    if id(original) in copies:
        return copies[id(original)]
    if isinstance(original, PreTrainedConfig):
        copies[id(original)] = without_attention_dropout(copy.deepcopy(original))
        return copies[id(original)]
    twin = copies[id(original)] = copy.copy(original)
    for name, value in vars(original).items():
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            vars(twin)[name] = copy.copy(value)
        elif isinstance(value, PreTrainedConfig):
            vars(twin)[name] = _copied(value, copies)
    twin._modules = {
        name: child if child is None else _copied(child, copies)
        for name, child in original._modules.items()
    }
    return twin


def _settings(module: nn.Module) -> tuple[int, list[tuple[str, Any]]]:
    """What a module has been set to, such as the rate of a dropout or which adapters are active:
    the number of all its attributes, and those that are settings."""
    attributes = vars(module)
    settings = [
        (name, value[:] if isinstance(value, list) else value)
        for name, value in attributes.items()
        if isinstance(value, _PLAIN) and name != "training"
    ]
    return len(attributes), settings


def _changed(known: list[tuple[dict[str, Any], int, list[tuple[str, Any]]]]) -> bool:
    """Whether attributes of modules are not what :func:`_settings` found."""
    for attributes, count, settings in known:
        if len(attributes) != count:
            return True
        for name, value in settings:
            found = attributes.get(name)
            if found is not value and found != value:
                return True
    return False


def _check(model: nn.Module, modules: list[nn.Module]) -> None:
    """Raise ValueError where modules are called otherwise than by their own code."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{kind} is no model of transformers, which alone have packed attention")
    if model.config.output_hidden_states or model.config.output_attentions:
        raise ValueError(
            f"{kind} gives out the states or the attention of every layer, which do not exist for "
            "packed tokens: set config.output_hidden_states and output_attentions to False"
        )
    if any("forward" in vars(module) for module in modules):
        raise ValueError(
            f"parts of {kind} have a forward of their own, as device_map and other libraries put "
            "it there: load the model without"
        )
    if any(map(is_sharded, model.parameters())):
        raise ValueError(f"the parameters of {kind} are sharded, which packed tokens do not allow")
