"""What tells whether texts were encoded by a model."""

from typing import TYPE_CHECKING

from sparton.datasets.tokenization import without_truncation
from sparton.digests import texts_digest

if TYPE_CHECKING:
    from sparton.models.encoder import Encoder


def encoder_digest(encoder: "Encoder") -> str:
    """A digest of what makes an encoder's representations what they are, whichever kernels run and
    wherever its folder lies: weights, tokenizers, and what it and its head were set to."""
    from sparton.models.identity import settings_of, weights_digest

    tokenizers = (encoder.tokenizer, encoder.query_tokenizer)
    said = [without_truncation(each).to_str() for each in tokenizers]
    said += [type(encoder).__name__, encoder.similarity]
    said += [f"{name}={value!r}" for name, value in settings_of(encoder)]
    return texts_digest([weights_digest(encoder.state_dict()), *said])
