"""Invented words with the frequencies of natural ones, and the tokenizer that knows them."""

from itertools import chain, count, islice, product
from typing import TYPE_CHECKING

import numpy as np

from sparton.models.backbones import SPECIAL_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LONGEST_TEXT = 512
AROUND = 2  # [CLS] and [SEP]
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
_ZIPF_SHIFT = 2.7  # Mandelbrot's, of English


def words(vocabulary: int) -> list[str]:
    """Invented words, all different, short ones first."""
    by_length = (map("".join, product(_SYLLABLES, repeat=length)) for length in count(1))
    return list(islice(chain.from_iterable(by_length), vocabulary - len(SPECIAL_TOKENS)))


def word_tokenizer(vocabulary: int) -> "PreTrainedTokenizerFast":
    """BERT's tokenizer, of a vocabulary of whole words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    rows = {word: row for row, word in enumerate((*SPECIAL_TOKENS, *words(vocabulary)))}
    tokenizer = Tokenizer(models.WordPiece(rows, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, rows[token]) for token in ("[CLS]", "[SEP]")],
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=LONGEST_TEXT, **names
    )


class Frequencies:
    """Of some words, the most frequent first; those of a natural language."""

    def __init__(self, number: int) -> None:
        self._cumulative = np.cumsum(1.0 / (np.arange(number) + _ZIPF_SHIFT))

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """int64 ``[count]``, numbers of words."""
        found = np.searchsorted(self._cumulative, random.random(count) * self._cumulative[-1])
        return found.clip(max=len(self._cumulative) - 1)
