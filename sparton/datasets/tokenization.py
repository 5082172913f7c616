"""Texts to packed token batches. N texts, T tokens in all, S the query length."""

import copy
import os
from collections.abc import Sequence
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sparton.arguments import ArgumentError, refuse_lone_text
from sparton.types import Forms, Markup, Side, TextForm, TokenBatch, TokenRows

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
        document_length: tokens kept of a document, special tokens and marker included. Where texts
            are repeated, either length is that of both copies and what stands between them.
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
        self.max_length = max_length
        self.markup = markup
        # Copies of its own, so that the truncation set here is not saved with the model; one of
        # each side, so that threads with texts of both do not change each other's.
        documents = without_truncation(tokenizer)
        queries = without_truncation(tokenizer if query_tokenizer is None else query_tokenizer)
        query = _Form(query_length, markup.query_prompt)
        document = _Form(document_length, markup.document_prompt)
        self._queries = _Texts("query", queries, query, markup, max_length)
        self._documents = _Texts("document", documents, document, markup, max_length)

    def queries(self, texts: Sequence[str], forms: Forms = None) -> TokenBatch:
        """N queries packed; an empty text keeps its special tokens. With an expansion token all
        have the query length, and ``keys`` are the other tokens unless they attend to it. Where
        prompts are not pooled, ``pooled`` are the tokens after them.

        Args:
            forms: of all texts, or of each; None for the lengths and prompts of the tokenizer.

        Raises:
            ValueError: a form's length has no room for text, or is more than the model supports.
        """
        tokens = self._queries.tokenize(texts, forms)
        if self.markup.expansion is None:
            return _pooling(_batch(tokens), tokens, np.arange(len(tokens.ids)))
        filled, places = _fill(tokens, self.markup.expansion)
        keys = None if self.markup.attend_to_expansion else _rows(places, tokens.lengths)
        return _pooling(_batch(filled)._replace(keys=keys), tokens, places)

    def documents(self, texts: Sequence[str], forms: Forms = None) -> TokenBatch:
        """N documents packed; an empty text keeps its special tokens.

        Args:
            forms: see :meth:`queries`.

        Raises:
            ValueError: see :meth:`queries`.
        """
        tokens = self._documents.tokenize(texts, forms)
        return _pooling(_batch(tokens), tokens, np.arange(len(tokens.ids)))

    def fill_length(
        self, texts: Sequence[str], side: Side, forms: Forms = None
    ) -> npt.NDArray[np.bool_]:
        """Which of N texts have as many tokens as are kept of them, or more: those that are cut,
        and a few that just fit.

        Args:
            forms: see :meth:`queries`.
        """
        tokens = (self._queries if side == "query" else self._documents).tokenize(texts, forms)
        return tokens.lengths >= tokens.limits


class _Tokens(NamedTuple):
    """Ids ``[T]`` of N sequences and, ``[N]`` each, their lengths, the lengths at which they were
    cut, and how many of their first tokens are not pooled."""

    ids: Ints
    lengths: Ints
    limits: Ints
    unpooled: Ints

    @property
    def starts(self) -> Ints:
        return self.lengths.cumsum() - self.lengths


class _Form(NamedTuple):
    """How a text of one side is read: tokens kept of it, and what is put before it."""

    length: int
    prompt: str


class _Texts:
    """How one side's texts become tokens."""

    def __init__(
        self,
        side: Side,
        tokenizer: "Tokenizer",
        usual: _Form,
        markup: Markup,
        max_length: int | None,
    ) -> None:
        self._side: Side = side
        self._tokenizer = tokenizer
        self._usual = usual
        self._marker = markup.query_marker if side == "query" else markup.document_marker
        self._include_prompt = markup.include_prompt
        self._echo = markup.echo
        self._max_length = max_length
        marked = self._marker is not None
        self._special = tokenizer.num_special_tokens_to_add(False) + marked
        special = tokenizer.encode("a").special_tokens_mask
        self._opening = special.index(0) if 0 in special else len(special)
        self._closing = self._special - marked - self._opening
        self._unpooled: dict[_Form, int] = {}  # how many first tokens are not pooled, by form
        self._check(usual)

    def tokenize(self, texts: Sequence[str], forms: Forms) -> _Tokens:
        refuse_lone_text(texts)
        sequences: list[list[int]] = [[]] * len(texts)
        limits, unpooled = np.empty((2, len(texts)), np.int64)
        for form, rows in self._groups(len(texts), forms).items():
            limits[rows], unpooled[rows] = form.length, self._unpooled[form]
            chosen = [texts[row] for row in rows]
            if self._echo is None:
                encoded = self._encode([form.prompt + text for text in chosen], form.length)
            else:
                encoded, unpooled[rows] = self._encode_twice(chosen, form)
            for row, sequence in zip(rows, encoded, strict=True):
                sequences[row] = sequence
        lengths = np.fromiter(map(len, sequences), np.int64, count=len(sequences))
        ids = np.fromiter(chain.from_iterable(sequences), np.int64, count=lengths.sum())
        tokens = _Tokens(ids, lengths, limits, unpooled)
        if self._marker is None:
            return tokens
        ids = np.insert(ids, tokens.starts + self._opening, self._marker)
        return tokens._replace(ids=ids, lengths=lengths + 1)

    def _groups(self, number: int, forms: Forms) -> dict[_Form, Sequence[int]]:
        """Which of N texts are read in which form."""
        if forms is None or isinstance(forms, TextForm):
            return {self._complete(forms or TextForm()): range(number)}
        if len(forms) != number:
            raise ValueError(f"{len(forms)} forms for {number} texts: give one for each text")
        groups: dict[_Form, list[int]] = {}
        complete = {form: self._complete(form) for form in set(forms)}
        for row, form in enumerate(forms):
            groups.setdefault(complete[form], []).append(row)
        return {**groups}

    def _complete(self, form: TextForm) -> _Form:
        """What a form says of this side, and the usual where it says nothing."""
        length, prompt = form.of(self._side)
        full = _Form(
            self._usual.length if length is None else length,
            self._usual.prompt if prompt is None else prompt,
        )
        if full not in self._unpooled:
            self._check(full)
        return full

    def _check(self, form: _Form) -> None:
        """Raise ValueError unless the model has the positions and the length has room for text."""
        name, length = f"{self._side}_length", form.length
        if self._max_length is not None and length > self._max_length:
            most = self._max_length
            raise ArgumentError(
                f"{{{name}}} is more than the {most} positions of the model: set "
                f"{{{name}:name}} to {most} or less",
                **{name: length},
            )
        with _truncating():
            self._tokenizer.no_truncation()
            prompted, between = (self._count(text) for text in (form.prompt, self._echo or ""))
        least = self._special + prompted + between + (1 if self._echo is None else 2)
        if length < least:
            beside = f"{self._special} special tokens"
            if prompted:
                beside += f" and {prompted} of the prompt"
            if self._echo is not None:
                beside += f" and {between} between its two copies"
            raise ArgumentError(
                f"{{{name}}} leaves no room for text beside {beside}: set {{{name}:name}} to "
                f"{least} or more",
                **{name: length},
            )
        before = self._opening + (self._marker is not None)
        included = self._include_prompt or not prompted
        self._unpooled[form] = 0 if included else before + prompted

    def _count(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_twice(self, texts: list[str], form: _Form) -> tuple[list[list[int]], list[int]]:
        """Ids of texts that are repeated, either copy cut at the same length, and how many tokens
        come before the second, the marker included."""
        assert self._echo is not None
        marked = self._marker is not None
        between, before = self._count(self._echo), self._special + self._count(form.prompt)
        room = (form.length - before - between) // 2
        whole = self._encode([form.prompt + text for text in texts], before + room)
        again = [self._echo + text for text in texts]
        with _truncating():
            self._tokenizer.enable_truncation(between + room)
            copies = self._tokenizer.encode_batch(again, add_special_tokens=False)
        sequences, unpooled = [], []
        for ids, second in zip(whole, copies, strict=True):
            end = len(ids) - self._closing
            sequences.append(ids[:end] + second.ids + ids[end:])
            outside = sum(stop <= len(self._echo) for _, stop in second.offsets)
            unpooled.append(end + outside + marked)
        return sequences, unpooled

    def _encode(self, texts: list[str], length: int) -> list[list[int]]:
        with _truncating():
            self._tokenizer.enable_truncation(length if self._marker is None else length - 1)
            encodings = self._tokenizer.encode_batch_fast(texts)
        return [encoding.ids for encoding in encodings]


class _Turns:
    """Where a tokenizer cuts is a state that all of its calls share: threads take turns. A process
    that is forked has a lock of its own, as that of its parent may be held."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = Lock()

    def __call__(self) -> Lock:
        return self._lock


_truncating = _Turns()


def _batch(tokens: _Tokens) -> TokenBatch:
    places = np.arange(len(tokens.ids))
    whole = _rows(places, tokens.lengths)
    return TokenBatch(
        torch.from_numpy(tokens.ids),
        torch.from_numpy(places - np.repeat(tokens.starts, tokens.lengths)),
        whole.cu_seqlens,
        whole.max_seqlen,
    )


def _fill(tokens: _Tokens, expansion: int) -> tuple[_Tokens, Ints]:
    """Sequences of full length with ``expansion`` in the free places, and where the tokens lie."""
    filled = tokens._replace(lengths=tokens.limits)
    moves = np.repeat(filled.starts - tokens.starts, tokens.lengths)
    places = np.arange(len(tokens.ids)) + moves
    ids = np.full(filled.lengths.sum(), expansion)
    ids[places] = tokens.ids
    return filled._replace(ids=ids), places


def _pooling(batch: TokenBatch, tokens: _Tokens, places: Ints) -> TokenBatch:
    """The batch in which the tokens lie at those places, pooled without the first of each text."""
    if not tokens.unpooled.any():
        return batch
    first = np.repeat(tokens.starts + tokens.unpooled, tokens.lengths)
    kept = np.arange(len(places)) >= first
    # A prompt may have fewer tokens where it runs into the text than by itself.
    lengths = np.maximum(tokens.lengths - tokens.unpooled, 0)
    return batch._replace(pooled=_rows(places[kept], lengths))


def _rows(places: Ints, lengths: Ints) -> TokenRows:
    """Tokens at those places, so many of each sequence."""
    boundaries = np.concatenate([[0], lengths.cumsum()])
    return TokenRows(
        torch.from_numpy(places),
        torch.from_numpy(boundaries.astype(np.int32)),
        max(int(lengths.max(initial=1)), 1),
    )


def without_truncation(tokenizer: "PreTrainedTokenizerFast") -> "Tokenizer":
    """A copy of what tokenizes, which neither cuts nor pads.

    Raises:
        ValueError: a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is a slow tokenizer; a fast one "
            "(tokenizer.json in the model folder) is needed"
        )
    own = copy.deepcopy(tokenizer.backend_tokenizer)
    own.no_padding()
    own.no_truncation()
    return own
