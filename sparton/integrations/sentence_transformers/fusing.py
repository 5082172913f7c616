"""Models of sentence-transformers on packed tokens and fused heads, in place."""

import logging
from typing import Any, TypeVar

from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import nn
from transformers import PreTrainedTokenizerBase

from sparton.integrations.sentence_transformers.forwards import (
    FusedSpladePooling,
    PackedPreprocess,
    PackedTransformer,
    PaddedMask,
    Replacement,
)
from sparton.models.body import ATTENTION_DROPOUTS

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

_OUTPUTS = {"fill-mask": "logits", "feature-extraction": "last_hidden_state"}
_FORWARDS: dict[type[nn.Module], type[Replacement]] = {
    Transformer: PackedTransformer,
    SpladePooling: FusedSpladePooling,
    MultiVectorMask: PaddedMask,
}


def fuse(model: Model) -> Model:
    """Let a model run without padding and without logits, in place; returns it.

    Its transformers run on packed tokens, over the same parameters, and ``SpladePooling`` becomes
    the fused head. Outputs and gradients are the same up to rounding. Parameters, state dict, saved
    folders and exports are what they were, and :func:`unfuse` takes everything back. A fused model
    can be moved, copied and pickled; one that was loaded from a folder has to be fused again.

    Four things differ. Attention dropout is left out in training, with a warning, as packed
    attention has none. The output of a ``SparseEncoder`` holds no logits of single tokens, and its
    ``input_ids``, like the ``token_embeddings`` of a ``SentenceTransformer`` in training, lie end
    to end. Hooks on parts of a transformer run if they were there before. And where a tokenizer
    pads on the left, positions count from a text's first token; stock models with absolute
    positions count from the padding, so that what else is in the batch changes their outputs.

    Args:
        model: a ``SparseEncoder`` of a masked-language model and ``SpladePooling``, a
            ``MultiVectorEncoder``, a ``SentenceTransformer``, or one of these with a ``Router``, of
            which the routes with a transformer are fused.

    Raises:
        ValueError: a part that cannot be fused, by its name. Nothing is changed then.
    """
    parts = _parts(model)
    if not any(isinstance(part, Transformer) for part in parts):
        kinds = " and ".join(type(part).__name__ for part in model.children())
        raise ValueError(
            f"{type(model).__name__} of {kinds or 'no modules'} has no transformer to be fused"
        )
    made = [(part, _forward_of(part)) for part in parts if not _is_fused(part)]
    for part, forward in made:
        part.forward = forward
        if isinstance(part, Transformer):
            _warn_of_dropout(part)
            part.preprocess = PackedPreprocess(part)
    return model


def unfuse(model: Model) -> Model:
    """Take back what :func:`fuse` did to a model, in place; returns it."""
    for part in filter(_is_fused, model.modules()):
        del part.forward
        if isinstance(part, Transformer):
            del part.preprocess
    return model


def _parts(model: nn.Module) -> list[Any]:
    """The modules that are given another forward.

    Raises:
        ValueError: a transformer that cannot be, or what follows it.
    """
    routers: list[Any] = [module for module in model.modules() if isinstance(module, Router)]
    routes = [list(route) for router in routers for route in router.sub_modules.values()]
    parts: dict[int, Any] = {}
    for modules in (list(model.children()), *routes):
        for module, after in zip(modules, [*modules[1:], None]):
            if isinstance(module, Transformer):
                _check_transformer(module)
                parts[id(module)] = module
                if module.transformer_task == "fill-mask":
                    _check_pooling(module, after)
                    parts[id(after)] = after
            elif isinstance(module, MultiVectorMask):
                parts[id(module)] = module
    for part in parts.values():
        _check_stock(part)
    return list(parts.values())


def _check_transformer(module: Any) -> None:
    output = _OUTPUTS.get(module.transformer_task)
    text = module.modality_config.get("text", {})
    if output is None or (text.get("method"), text.get("method_output_name")) != (
        "forward",
        output,
    ):
        raise ValueError(
            f"a Transformer of {module.transformer_task} that calls {text.get('method')} for "
            f"{text.get('method_output_name')} cannot be fused: fill-mask and feature-extraction "
            "can, where forward gives logits or last_hidden_state"
        )
    if len(module.modality_config) > 1:
        kinds = ", ".join(map(str, module.modality_config))
        raise ValueError(f"a Transformer of {kinds} cannot be fused: one of text alone can")
    if module.backend != "torch":
        raise ValueError(f'backend="{module.backend}" cannot be fused: load the model in torch')
    if not isinstance(module.tokenizer, PreTrainedTokenizerBase) or not module.tokenizer.is_fast:
        raise ValueError(f"{type(module.model).__name__} has no fast tokenizer")


def _check_pooling(module: Any, after: nn.Module | None) -> None:
    if not isinstance(after, SpladePooling):
        found = "nothing" if after is None else type(after).__name__
        raise ValueError(
            f"the logits of {type(module.model).__name__} go to {found}; SpladePooling directly "
            "after the Transformer can be fused"
        )


def _check_stock(part: Any) -> None:
    """Raise ValueError unless it runs sentence-transformers' own code, or ours."""
    stock = next(kind for kind in _FORWARDS if isinstance(part, kind))
    patched = not _is_fused(part) and {"forward", "preprocess"} & set(vars(part))
    if patched or type(part).forward is not stock.forward:
        raise ValueError(
            f"{type(part).__module__}.{type(part).__name__} has methods of its own in place of "
            f"those of {stock.__module__}.{stock.__name__}, which would be passed over: use it as "
            "it is, or train it by sparton train, if it is a model of this project"
        )


def _forward_of(part: nn.Module) -> Any:
    return next(make for kind, make in _FORWARDS.items() if isinstance(part, kind))(part)


def _is_fused(part: nn.Module) -> bool:
    return isinstance(vars(part).get("forward"), Replacement)


def _warn_of_dropout(module: Any) -> None:
    for name in ATTENTION_DROPOUTS:
        if rate := getattr(module.model.config, name, 0.0):
            logger.warning(
                f"{type(module.model).__name__} trains without its {name} of {rate} while it is "
                "fused; other dropout, and the configuration that is saved, stay as they are"
            )
