"""Texts to packed token batches. N texts, T tokens in all, S the query length."""

import copy
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sparton.types import KeyTokens, Markup, TokenBatch

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Ints = npt.NDArray[np.int64]


class PackedTokenizer:
    """Tokenizes queries and documents, each cut at its own length, without padding.

    Args:
        tokenizer: a fast tokenizer of Hugging Face transformers.
        query_length: tokens kept of a query, special tokens and marker included; with an expansion
            token the number that every query has.
        document_length: tokens kept of a document, special tokens and marker included.
        max_length: positions the model supports, if known.
        markup: what the model adds to the tokens of a text.
        query_tokenizer: of the queries, where it is another.

    Raises:
        ValueError: a slow tokenizer, a length with no room for text, or one beyond ``max_length``.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        query_length: int,
        document_length: int,
        *,
        max_length: int | None = None,
        markup: Markup = Markup(),  # noqa: B008
        query_tokenizer: "PreTrainedTokenizerFast | None" = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.query_length = query_length
        self.document_length = document_length
        self.markup = markup
        query_tokenizer = query_tokenizer or tokenizer
        lengths = {"query_length": query_length, "document_length": document_length}
        for name, length in lengths.items():
            if max_length is not None and length > max_length:
                raise ValueError(
                    f"{name}={length} is more than the {max_length} positions of the model: "
                    f"set {name} to {max_length} or less"
                )
        query = (markup.query_marker, markup.query_prompt)
        document = (markup.document_marker, markup.document_prompt)
        _check(query_tokenizer, "query_length", query_length, *query)
        _check(tokenizer, "document_length", document_length, *document)
        # Copies of its own, so that the truncation set here is not saved with the model.
        documents = _own(tokenizer)
        queries = documents if query_tokenizer is tokenizer else _own(query_tokenizer)
        self._queries = _Side(queries, query_length, *query)
        self._documents = _Side(documents, document_length, *document)

    def queries(self, texts: Sequence[str]) -> TokenBatch:
        """N queries packed; an empty text keeps its special tokens. With an expansion token all
        have the query length, and ``keys`` are the other tokens unless they attend to it."""
        tokens = self._queries.tokenize(texts)
        expansion = self.markup.expansion
        if expansion is None:
            return _batch(tokens)
        keys, filled = _fill(tokens, self.query_length, expansion)
        return _batch(filled)._replace(keys=None if self.markup.attend_to_expansion else keys)

    def documents(self, texts: Sequence[str]) -> TokenBatch:
        """N documents packed; an empty text keeps its special tokens."""
        return _batch(self._documents.tokenize(texts))


class _Tokens(NamedTuple):
    """Ids ``[T]`` of N sequences, their lengths ``[N]`` and boundaries ``[N + 1]``."""

    ids: Ints
    lengths: Ints
    boundaries: Ints


class _Side:
    """How one side's texts become tokens."""

    def __init__(self, tokenizer: "Tokenizer", length: int, marker: int | None, prompt: str):
        self._tokenizer = tokenizer
        self._room = length if marker is None else length - 1
        self._marker = marker
        self._prompt = prompt
        special = tokenizer.encode("a").special_tokens_mask
        self._opening = special.index(0) if 0 in special else len(special)

    def tokenize(self, texts: Sequence[str]) -> _Tokens:
        texts = [self._prompt + text for text in texts] if self._prompt else list(texts)
        self._tokenizer.enable_truncation(self._room)
        sequences = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        lengths = np.fromiter(map(len, sequences), np.int64, count=len(sequences))
        boundaries = np.concatenate([[0], np.cumsum(lengths)])
        total = int(boundaries[-1])
        ids = np.fromiter(chain.from_iterable(sequences), np.int64, count=total)
        if self._marker is None:
            return _Tokens(ids, lengths, boundaries)
        ids = np.insert(ids, boundaries[:-1] + self._opening, self._marker)
        return _Tokens(ids, lengths + 1, boundaries + np.arange(len(boundaries)))


def _batch(tokens: _Tokens) -> TokenBatch:
    ids, lengths, boundaries = tokens
    position_ids = np.arange(len(ids)) - np.repeat(boundaries[:-1], lengths)
    return TokenBatch(
        torch.from_numpy(ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(boundaries.astype(np.int32)),
        max(int(lengths.max(initial=1)), 1),
    )


def _fill(tokens: _Tokens, length: int, expansion: int) -> tuple[KeyTokens, _Tokens]:
    """Sequences of that length with ``expansion`` in the free places; where the tokens lie."""
    number = len(tokens.lengths)
    bounds = np.arange(number + 1) * length
    rows = np.arange(len(tokens.ids)) + np.repeat(
        bounds[:-1] - tokens.boundaries[:-1], tokens.lengths
    )
    ids = np.full(number * length, expansion)
    ids[rows] = tokens.ids
    keys = KeyTokens(
        torch.from_numpy(rows),
        torch.from_numpy(tokens.boundaries.astype(np.int32)),
        max(int(tokens.lengths.max(initial=1)), 1),
    )
    return keys, _Tokens(ids, np.full(number, length), bounds)


def _own(tokenizer: "PreTrainedTokenizerFast") -> "Tokenizer":
    own = copy.deepcopy(tokenizer.backend_tokenizer)
    own.no_padding()
    own.no_truncation()
    return own


def _check(
    tokenizer: "PreTrainedTokenizerFast", name: str, length: int, marker: int | None, prompt: str
) -> None:
    """Raise ValueError unless the tokenizer and the length of a side leave room for text."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is a slow tokenizer; a fast one "
            "(tokenizer.json in the model folder) is needed"
        )
    special = tokenizer.num_special_tokens_to_add(pair=False) + (marker is not None)
    prompted = len(tokenizer.tokenize(prompt))
    if length <= special + prompted:
        beside = f"{special} special tokens"
        if prompted:
            beside += f" and {prompted} of the prompt"
        raise ValueError(
            f"{name}={length} leaves no room for text beside {beside}: set {name} to "
            f"{special + prompted + 1} or more"
        )
