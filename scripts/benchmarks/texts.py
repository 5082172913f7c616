"""Generated texts that cost as much to tokenise as English, and the tokenizer that reads them.

A piece of the vocabulary is a token. Words of one piece and of two, and punctuation, are as
frequent as BERT's tokenizer finds them in English: 1.3 times as many tokens as words.
"""

from collections.abc import Callable
from itertools import accumulate, chain, count, islice, pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.words import AROUND, Frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 30_522
QUERY_LENGTH, DOCUMENT_LENGTH = 64, 256
_QUERY_TOKENS, _DOCUMENT_TOKENS = (6, 64), (72, 256)
_QUERY_OPENING, _DOCUMENT_OPENING, _PASSAGE_OPENING = 3, 30, 10
# MS MARCO's passages: 77 tokens on average, one in twenty has 140 or more.
_PASSAGE_MEDIAN, _PASSAGE_SPREAD, _PASSAGE_TOKENS = 70, 0.42, (16, 256)
_FIRST, _LAST = 85, 10_000  # pieces that occur, of two syllables and three; all may end a word
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
_JOINED, _PUNCTUATION = 0.15, 0.1  # of the tokens
_POOL = 6000  # openings, and endings

Lengths = Callable[[np.random.Generator, int], np.ndarray]  # of so many texts, in tokens


class Texts:
    """Millions of different texts out of a few thousand: one that opens, one that goes on."""

    def __init__(self, draw: Lengths, opening: int, seed: int) -> None:
        """
        Args:
            draw: how many tokens texts have.
            opening: how many of these a text shares with others.
        """
        random = np.random.default_rng(seed)
        self._openings = _write(random, np.full(_POOL, opening))
        self._endings = _write(random, draw(random, _POOL) - AROUND - opening)

    def __getitem__(self, number: int) -> str:
        turn, place = divmod(number, _POOL)
        return f"{self._openings[(place + turn) % _POOL]} {self._endings[place]}"


def queries() -> Texts:
    return Texts(_uniform(_QUERY_TOKENS), _QUERY_OPENING, seed=1)


def documents() -> Texts:
    return Texts(_uniform(_DOCUMENT_TOKENS), _DOCUMENT_OPENING, seed=2)


def passages() -> Texts:
    """As long as MS MARCO's."""
    return Texts(_like_passages, _PASSAGE_OPENING, seed=3)


def _uniform(bounds: tuple[int, int]) -> Lengths:
    low, high = bounds
    return lambda random, number: random.integers(low, high + 1, number)


def _like_passages(random: np.random.Generator, number: int) -> np.ndarray:
    drawn = random.lognormal(np.log(_PASSAGE_MEDIAN), _PASSAGE_SPREAD, number)
    return drawn.round().astype(np.int64).clip(*_PASSAGE_TOKENS)


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """BERT's, with a vocabulary of the pieces that the texts are made of."""
    from tokenizers import models

    from sparton.models.words import SPECIAL_TOKENS, word_tokenizer

    whole = VOCABULARY - len(SPECIAL_TOKENS) - _LAST - 2
    pieces = [*words(whole), ",", ".", *(f"##{word}" for word in words(_LAST))]
    tokenizer = word_tokenizer(pieces, DOCUMENT_LENGTH)
    rows = tokenizer.get_vocab()
    tokenizer.backend_tokenizer.model = models.WordPiece(rows, unk_token="[UNK]")
    return tokenizer


def words(number: int) -> list[str]:
    """Invented words, all different, short ones first."""
    by_length = (map("".join, product(_SYLLABLES, repeat=length)) for length in count(1))
    return list(islice(chain.from_iterable(by_length), number))


def _write(random: np.random.Generator, sizes: np.ndarray) -> list[str]:
    names = words(_LAST)[_FIRST:]
    total = int(sizes.sum())
    chosen = Frequencies(len(names)).draw(random, total).tolist()
    kinds = random.random(total).tolist()
    spelt = [_spell(names[name], kind) for name, kind in zip(chosen, kinds)]
    bounds = pairwise(accumulate(sizes.tolist(), initial=0))
    return ["".join(spelt[start:stop]).strip() for start, stop in bounds]


def _spell(piece: str, kind: float) -> str:
    """A token with what parts it from the one before: punctuation, the end of a word, or a word."""
    if kind < _PUNCTUATION:
        return "," if kind < _PUNCTUATION / 2 else "."
    return piece if kind < _PUNCTUATION + _JOINED else f" {piece}"
