"""One model whose weights are the mean of several models' weights."""

from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path

from torch import nn
from torch.optim.swa_utils import get_swa_multi_avg_fn
from transformers import PreTrainedModel

from sparton.arguments import ArgumentError
from sparton.digests import texts_digest
from sparton.models.encoder import Encoder
from sparton.models.folders import (
    Lengths,
    encoder_lengths,
    load_encoder,
    save_encoder,
    usual_lengths,
)
from sparton.models.identity import settings_of
from sparton.models.origin import Origin

# Of a config of transformers, what is no part of the architecture.
_INCIDENTAL = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype")


def average_models(models: Sequence[str | Path], output: str | Path) -> None:
    """Write a model with the mean of the models' weights: a "soup" (Wortsman et al.,
    arXiv 2203.05482) of runs that began with the same pretrained weights. Of others the mean is
    a model that knows nothing.

    Args:
        models: two at least, folders or hub names; one is in memory beside the mean.
        output: folder of the model, which must not exist.

    Raises:
        ArgumentError: fewer than two models, or the output exists.
        ValueError: a model differs from the first in more than its weights; names in what.
        OSError: there is no such model, or the disk is full or not writable.
    """
    if len(models) < 2:
        raise ArgumentError("{models} has fewer than two models: name some more", models=[*models])
    if Path(output).exists():
        raise ArgumentError("{output} exists: remove it, or name another folder", output=output)
    mean, lengths = load_encoder(models[0]), encoder_lengths(models[0])
    expected = _architecture(mean, lengths)
    average = get_swa_multi_avg_fn()
    for number, name in enumerate(models[1:], 1):
        other = load_encoder(name)
        _check_same(models[0], expected, name, _architecture(other, encoder_lengths(name)))
        parameters = zip(mean.parameters(), other.parameters(), strict=True)
        for own, others in parameters:
            average([own.detach()], [others.detach()], number)
        mean.origin = _common(mean.origin, other.origin)
    query, document = usual_lengths(lengths, mean.max_length)
    save_encoder(mean, output, query_length=query, document_length=document)


def _architecture(encoder: Encoder, lengths: Lengths | None) -> dict[str, object]:
    """What two encoders have in common where a mean of their weights makes sense, by name."""
    found: dict[str, object] = {
        "kind": type(encoder).__name__,
        **_settings("lengths", lengths._asdict() if lengths else {}),
        "similarity": encoder.similarity,
        **_settings("markup", encoder.markup._asdict()),
        **_settings("score_weights", dict(encoder.score_weights)),
        "document tokenizer": texts_digest([encoder.tokenizer.backend_tokenizer.to_str()]),
        "query tokenizer": texts_digest([encoder.query_tokenizer.backend_tokenizer.to_str()]),
    }
    head = getattr(encoder, "head", None)
    if is_dataclass(head) and not isinstance(head, type):
        found |= _settings("head", asdict(head))
    for place, module in encoder.named_modules():
        if isinstance(module, PreTrainedModel):
            found |= _settings(place, module.config.to_dict())
    found |= {name.lstrip("."): value for name, value in settings_of(encoder)}
    foldings = {
        name: texts_digest([str(buffer.tolist())])
        for name, buffer in encoder.named_buffers()
        if name.endswith("fold.columns")
    }
    shapes = {name: list(weight.shape) for name, weight in encoder.named_parameters()}
    return found | foldings | _settings("shape", shapes)


def _settings(place: str, values: dict) -> dict[str, object]:
    return {
        f"{place}.{name}": value for name, value in values.items()
        if name not in _INCIDENTAL and not isinstance(value, nn.Module)
    }  # fmt: skip


def _check_same(
    first: str | Path, expected: dict[str, object], name: str | Path, found: dict[str, object]
) -> None:
    for key in {**expected, **found}:
        if expected.get(key) != found.get(key):
            raise ValueError(
                f"{name} has {key} {found.get(key)}, and {first} has {expected.get(key)}: models "
                "that are the same but for their weights alone have a mean; leave one of them out"
            )


def _common(one: Origin, other: Origin) -> Origin:
    """What is true of both, and the data of both."""
    return Origin(
        one.base_model if one.base_model == other.base_model else None,
        one.license if one.license == other.license else None,
        tuple(dict.fromkeys((*one.datasets, *other.datasets))),
    )
