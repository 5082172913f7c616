"""What tells whether texts were encoded by a model."""

from collections.abc import Iterator

from torch import nn

from sparton.datasets.tokenization import without_truncation
from sparton.digests import texts_digest
from sparton.models.body import EncoderBody
from sparton.models.encoder import Encoder
from sparton.models.identity import weights_digest

_SIMPLE = (str, int, float, bool, type(None))
# Of how it runs, where it comes from, and what stands in its weights.
_ELSEWHERE = ("training", "origin", "special_terms", "folding")


def encoder_digest(encoder: Encoder) -> str:
    """A digest of what makes an encoder's representations what they are, whichever kernels run and
    wherever its folder lies: weights, tokenizers, and what it and its head were set to."""
    tokenizers = (encoder.tokenizer, encoder.query_tokenizer)
    said = [without_truncation(each).to_str() for each in tokenizers]
    said += [type(encoder).__name__, encoder.similarity, *_settings(encoder)]
    return texts_digest([weights_digest(encoder.state_dict()), *said])


def _settings(encoder: Encoder) -> Iterator[str]:
    """Name and value of the settings of an encoder and of its parts, but for those of its body."""
    bodies = [name for name, part in encoder.named_modules() if isinstance(part, EncoderBody)]
    for name, part in encoder.named_modules():
        ours = type(part).__module__.startswith("sparton.")
        if ours and not any(f"{name}.".startswith(f"{body}.") for body in bodies):
            yield from (f"{name}.{each}" for each in _simple(part))


def _simple(part: nn.Module) -> Iterator[str]:
    for setting, value in sorted(vars(part).items()):
        values = value if isinstance(value, list | tuple) else [value]
        shown = not setting.startswith("_") and setting not in _ELSEWHERE
        if shown and all(isinstance(each, _SIMPLE) for each in values):
            yield f"{setting}={value!r}"
