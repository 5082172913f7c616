"""The tuples that cross from one room of the package to another."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor

from sparton import packing

Side = Literal["query", "document"]
Kind = Literal["sparse", "tokens", "dense"]
Similarity = Literal["dot", "cosine"]
SIDES: tuple[Side, Side] = ("query", "document")
PLURAL: dict[Side, str] = {"query": "queries", "document": "documents"}


class TokenRows(NamedTuple):
    """Some of the tokens of a batch, K of its T.

    Attributes:
        rows: int64 ``[K]``, their places among the T tokens, ascending.
        cu_seqlens: int32 ``[N + 1]``, the boundaries of the sequences among them.
        max_seqlen: upper bound of their number in a sequence, known on the host.
    """

    rows: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "TokenRows":
        rows, cu_seqlens = (t.to(device, non_blocking=non_blocking) for t in self[:2])
        return TokenRows(rows, cu_seqlens, self.max_seqlen)

    def pin_memory(self) -> "TokenRows":
        return TokenRows(self.rows.pin_memory(), self.cu_seqlens.pin_memory(), self.max_seqlen)


class TokenBatch(NamedTuple):
    """N token sequences packed end to end, without padding.

    Attributes:
        input_ids: int64 ``[T]``, T the number of real tokens.
        position_ids: int64 ``[T]``, restarting at 0 with every sequence.
        cu_seqlens: int32 ``[N + 1]``, the boundaries of the sequences; starts at 0, ends at T.
        max_seqlen: upper bound of the sequence lengths, known on the host.
        keys: the tokens that a sequence's tokens attend to; None for all of its own.
        pooled: the tokens that are pooled, by heads that make one vector of a text; None for all
            that are attended to.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    keys: TokenRows | None = None
    pooled: TokenRows | None = None

    @classmethod
    def from_lists(cls, sequences: Sequence[Sequence[int]]) -> "TokenBatch":
        """Pack token id lists; empty sequences are allowed."""
        lengths = torch.tensor([len(ids) for ids in sequences], dtype=torch.int64)
        cu_seqlens = torch.zeros(len(sequences) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=cu_seqlens[1:])
        input_ids = torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64)
        starts = torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
        position_ids = torch.arange(input_ids.numel()) - starts
        return cls(input_ids, position_ids, cu_seqlens, max((*lengths.tolist(), 1)))

    @classmethod
    def concatenate(cls, parts: Sequence["TokenBatch"]) -> "TokenBatch":
        """The sequences of all parts, in order."""
        keys = pooled = None
        if any(part.keys for part in parts):
            keys = _join([part.keys or part._all() for part in parts], parts)
        if any(part.pooled for part in parts):
            pooled = _join([part.pooled or part.keys or part._all() for part in parts], parts)
        whole = _join([part._all() for part in parts], parts)
        return cls(
            torch.cat([part.input_ids for part in parts]),
            torch.cat([part.position_ids for part in parts]),
            whole.cu_seqlens,
            whole.max_seqlen,
            keys,
            pooled,
        )

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "TokenBatch":
        input_ids, position_ids, cu_seqlens = (
            tensor.to(device, non_blocking=non_blocking) for tensor in self[:3]
        )
        keys, pooled = (
            each and each.to(device, non_blocking=non_blocking) for each in (self.keys, self.pooled)
        )
        return TokenBatch(input_ids, position_ids, cu_seqlens, self.max_seqlen, keys, pooled)

    def pin_memory(self) -> "TokenBatch":
        """The same in memory of the host from which a GPU copies by itself."""
        input_ids, position_ids, cu_seqlens = (tensor.pin_memory() for tensor in self[:3])
        keys, pooled = (each and each.pin_memory() for each in (self.keys, self.pooled))
        return TokenBatch(input_ids, position_ids, cu_seqlens, self.max_seqlen, keys, pooled)

    def select(self, start: int, stop: int) -> "TokenBatch":
        """Sequences ``start : stop`` as a batch of their own. Meant for batches on the CPU:
        it reads two boundaries, which on a GPU would wait for the device."""
        first, last, cu_seqlens, longest = _cut(self.cu_seqlens, start, stop)

        def select_rows(some: TokenRows | None) -> TokenRows | None:
            if some is None:
                return None
            low, high, bounds, most = _cut(some.cu_seqlens, start, stop)
            return TokenRows(some.rows[low:high] - first, bounds, most)

        tokens = self.input_ids[first:last], self.position_ids[first:last]
        some = select_rows(self.keys), select_rows(self.pooled)
        return TokenBatch(*tokens, cu_seqlens, longest, *some)

    def take(self, rows: Tensor) -> "TokenBatch":
        """The sequences of int64 ``rows [M]``, in that order. Meant for batches on the CPU."""
        places, bounds, longest = _gather(self.cu_seqlens, rows)
        moves = (bounds[:-1] - self.cu_seqlens[:-1][rows]).long()

        def take_rows(some: TokenRows | None) -> TokenRows | None:
            if some is None:
                return None
            inner, boundaries, most = _gather(some.cu_seqlens, rows)
            moved = some.rows[inner] + torch.repeat_interleave(moves, boundaries.diff())
            return TokenRows(moved, boundaries, most)

        tokens = _at(self.input_ids, places), _at(self.position_ids, places)
        return TokenBatch(*tokens, bounds, longest, take_rows(self.keys), take_rows(self.pooled))

    def to_pool(self, states: Tensor) -> tuple[Tensor, "TokenBatch"]:
        """The tokens that are pooled: their states, out of ``states [T, ...]``, and their batch."""
        some = self.pooled or self.keys
        if some is None:
            return states, self
        states, input_ids, position_ids = (
            each.index_select(0, some.rows) for each in (states, self.input_ids, self.position_ids)
        )
        return states, TokenBatch(input_ids, position_ids, some.cu_seqlens, some.max_seqlen)

    def pad(self, packed: Tensor, fill: float = 0) -> Tensor:
        """Per-token values ``[T, ...]`` as ``[N, S, ...]``, S = ``max_seqlen``."""
        return packing.pad(packed, self.cu_seqlens, self.max_seqlen, fill)

    def padding_mask(self) -> Tensor:
        """bool ``[N, S]``, True at real tokens."""
        return packing.padding_mask(self.cu_seqlens, self.max_seqlen)

    def _all(self) -> TokenRows:
        rows = torch.arange(self.num_tokens, device=self.input_ids.device)
        return TokenRows(rows, self.cu_seqlens, self.max_seqlen)


def _cut(cu_seqlens: Tensor, start: int, stop: int) -> tuple[int, int, Tensor, int]:
    """First and last token of sequences ``start : stop``, their boundaries, the longest length."""
    first, last = cu_seqlens[[start, stop]].tolist()
    bounds = cu_seqlens[start : stop + 1] - first
    return first, last, bounds, max(int(bounds.diff().max()) if stop > start else 0, 1)


def _gather(cu_seqlens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """Places of the tokens of sequences ``rows``, their boundaries, the longest length."""
    # NumPy, lest every batch wake all of torch's threads for a few arrays of integers.
    ends, wanted = cu_seqlens.numpy(), rows.numpy()
    lengths = np.diff(ends)[wanted]
    bounds = np.zeros(len(wanted) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    moves = np.repeat(ends[:-1][wanted].astype(np.int64) - bounds[:-1], lengths)
    places = moves + np.arange(len(moves))
    return torch.from_numpy(places), torch.from_numpy(bounds), int(lengths.max(initial=1))


def _at(values: Tensor, places: Tensor) -> Tensor:
    return torch.from_numpy(values.numpy()[places.numpy()])


def _join(some: Sequence[TokenRows], parts: Sequence[TokenBatch]) -> TokenRows:
    """Some tokens of every part, as tokens of all parts end to end."""
    rows, bounds, before, total = [], [some[0].cu_seqlens[:1]], 0, 0
    for each, part in zip(some, parts, strict=True):
        rows.append(each.rows + before)
        bounds.append(each.cu_seqlens[1:] + total)
        before += part.num_tokens
        total += each.rows.numel()
    return TokenRows(torch.cat(rows), torch.cat(bounds), max(each.max_seqlen for each in some))


class TextForm(NamedTuple):
    """How the texts of one source or task are read where it is not the model's own way.

    Attributes:
        query_length, document_length: tokens kept of a text; None for those of the tokenizer.
        query_prompt, document_prompt: put before the text in place of the model's own prompt; None
            for the model's.
    """

    query_length: int | None = None
    document_length: int | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None

    def of(self, side: Side) -> tuple[int | None, str | None]:
        """Length and prompt of one side."""
        if side == "query":
            return self.query_length, self.query_prompt
        return self.document_length, self.document_prompt


# Of all texts of a call, or of each; None for the way in which the model reads texts.
Forms = TextForm | Sequence[TextForm] | None


class Tokenizer(Protocol):
    """Texts to token batches, as a ``PackedTokenizer`` and ``TextRows`` make them."""

    def queries(self, texts: Sequence[str], forms: Forms = None) -> TokenBatch: ...

    def documents(self, texts: Sequence[str], forms: Forms = None) -> TokenBatch: ...


class Markup(NamedTuple):
    """What a model adds to the tokens of a text.

    Attributes:
        query_marker, document_marker: id of the token between those that open a text ([CLS]) and
            the text; None for nothing.
        expansion: id of the token that fills queries up to the query length ([MASK]); None leaves
            queries as they are.
        attend_to_expansion: whether a query's tokens attend to the tokens that filled it up. Those
            attend to the text's tokens in any case.
        query_prompt, document_prompt: put before the text itself, to be tokenised with it.
        include_prompt: whether heads that make one vector of a text pool the tokens of its prompt
            and those before them, which the other tokens attend to in any case.
        echo: what stands between a text and its repetition, which alone is pooled; None where texts
            are read once.
    """

    query_marker: int | None = None
    document_marker: int | None = None
    expansion: int | None = None
    attend_to_expansion: bool = False
    query_prompt: str = ""
    document_prompt: str = ""
    include_prompt: bool = True
    echo: str | None = None


class TokenPooling(NamedTuple):
    """How many vectors of a document are stored; those of tokens that are alike become one.

    Attributes:
        factor: of so many tokens one vector is left; 1 leaves all.
        protected: the first tokens, which keep their own.
        normalize: give every vector that is left the length 1.
    """

    factor: float = 1.0
    protected: int = 1
    normalize: bool = True


class Prompts(TypedDict, total=False):
    """The settings of a :class:`Markup` that heads without markers have."""

    query_prompt: str
    document_prompt: str
    include_prompt: bool


class Example(NamedTuple):
    """One training example in text form.

    ``teacher_scores`` is empty or holds one score for the positive and one per negative.
    """

    query: str
    positive: str
    negatives: tuple[str, ...] = ()
    teacher_scores: tuple[float, ...] = ()


class DocumentCounts(NamedTuple):
    """How many documents each of Q queries has, where they may have different numbers.

    Attributes:
        each: int64 ``[Q]``, at least 1.
        most: upper bound, the same on all ranks.
    """

    each: Tensor
    most: int


class TrainBatch(NamedTuple):
    """One rank's share of a training batch: Q queries with 1 + K documents each, or some of them
    with their positive alone.

    Attributes:
        queries: Q sequences.
        documents: sequences grouped by query, the positive of each first, then its explicit
            negatives; ``Q * (1 + K)`` of them unless there are ``counts``.
        teacher_scores: fp32 ``[Q, 1 + K]``, or None.
        counts: documents of each query; None where all have 1 + K. All ranks have them or none.
        sources: int64 ``[Q]``, number of each query's source; None where there is one.
    """

    queries: TokenBatch
    documents: TokenBatch
    teacher_scores: Tensor | None = None
    counts: DocumentCounts | None = None
    sources: Tensor | None = None

    @property
    def sides(self) -> dict[Side, TokenBatch]:
        return {"query": self.queries, "document": self.documents}

    @property
    def most_documents(self) -> int:
        """1 + K, the most documents that a query has on any rank."""
        if self.counts is not None:
            return self.counts.most
        return self.documents.num_sequences // self.queries.num_sequences

    def bounds(self) -> list[int]:
        """Query i has the documents ``bounds[i] : bounds[i + 1]``; of a batch on the CPU."""
        if self.counts is not None:
            return [0, *self.counts.each.cumsum(0).tolist()]
        return [row * self.most_documents for row in range(self.queries.num_sequences + 1)]

    def select(self, start: int, stop: int) -> "TrainBatch":
        """Queries ``start : stop`` with all that belongs to them; of a batch on the CPU."""
        bounds, rows = self.bounds(), slice(start, stop)
        return TrainBatch(
            self.queries.select(start, stop),
            self.documents.select(bounds[start], bounds[stop]),
            None if self.teacher_scores is None else self.teacher_scores[rows],
            self.counts and self.counts._replace(each=self.counts.each[rows]),
            None if self.sources is None else self.sources[rows],
        )


class TextCollection(NamedTuple):
    """Identifiers and texts of equal length, in a fixed order."""

    ids: Sequence[str]
    texts: Sequence[str]


class RetrievalTask(NamedTuple):
    """What an evaluation needs: a collection, queries, and graded judgments.

    Attributes:
        name: shown in tables and used in file names.
        documents: the full collection; a document's text is its title, a space, its body.
        queries: only queries that have at least one judgment.
        qrels: query id to document id to grade (0 is judged not relevant).
        exclude_self: leave a document whose id equals the query's id out of that query's ranking
            (ArguAna, Quora).
        form: lengths and prompts of this task, whichever model reads it.
        excluded: query id to ids of other documents that are left out of its ranking (BRIGHT).
    """

    name: str
    documents: TextCollection
    queries: TextCollection
    qrels: dict[str, dict[str, int]]
    exclude_self: bool = False
    form: TextForm = TextForm()
    excluded: Mapping[str, Collection[str]] = MappingProxyType({})


class BodyOptions(TypedDict, total=False):
    """How a body runs and learns, whatever its weights; see
    :class:`~sparton.models.body.EncoderBody`."""

    compile: bool
    half_residual: bool
    gradient_checkpointing: bool
    lora: Mapping[str, Any] | None
