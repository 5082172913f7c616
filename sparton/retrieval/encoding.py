"""Encoding whole collections. N texts, V terms."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sparton.representations import Representations
from sparton.retrieval.progress import progress_bar
from sparton.retrieval.sparse import SparseRows
from sparton.retrieval.tokens import TokenRows, VectorDtype
from sparton.sparse_vectors import SparseVectors
from sparton.types import Kind, Side, TokenBatch, Tokenizer

KINDS: dict[Kind, str] = {"sparse": "sparse vectors", "tokens": "token vectors"}

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_TEXTS_TOKENIZED_AT_ONCE = 2048


class EncodedTexts(NamedTuple):
    """What an encoder made of N texts, on the host; a field that it does not give is None.

    Attributes:
        sparse: weights of terms or latents.
        tokens: one vector per token.
    """

    sparse: SparseRows | None = None
    tokens: TokenRows | None = None

    @classmethod
    def concatenate(cls, parts: Sequence["EncodedTexts"]) -> "EncodedTexts":
        """The texts of all parts, in order; all parts have the same fields."""
        sparse = [part.sparse for part in parts if part.sparse is not None]
        tokens = [part.tokens for part in parts if part.tokens is not None]
        return cls(
            SparseRows.concatenate(sparse) if sparse else None,
            TokenRows.concatenate(tokens) if tokens else None,
        )

    def take(self, rows: NDArray[np.int64]) -> "EncodedTexts":
        """The given texts, in the given order."""
        return EncodedTexts(
            self.sparse and self.sparse.take(rows), self.tokens and self.tokens.take(rows)
        )

    def slice(self, start: int, stop: int) -> "EncodedTexts":
        """Texts ``start : stop``, without a copy."""
        sparse = self.sparse and self.sparse.slice(start, stop)
        return EncodedTexts(sparse, self.tokens and self.tokens.slice(start, stop))

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(kind for kind in KINDS if getattr(self, kind) is not None)


def encode_texts(
    encoder: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    side: Side,
    *,
    batch_tokens: int = 16_384,
    batch_sequences: int = 256,
    precision: str = "fp32",
    kinds: Collection[Kind] | None = None,
    max_terms: int | None = None,
    vector_dtype: VectorDtype = "float16",
    progress: str | None = None,
) -> EncodedTexts:
    """Representations of ``texts``, in their order; no dense matrix outlives its batch. Sparse ones
    have length 1 where the encoder's are compared by cosine.

    Long texts come first, so that a batch too large for the device shows at once, and texts of
    like length share a batch. A thread tokenises ahead of the encoder.

    Args:
        encoder: an :class:`~sparton.models.encoder.Encoder`. If it has ``topk`` and
            ``vocabulary_size`` as :class:`~sparton.models.splade.SpladeEncoder` has them, these
            spare it the dense representations where ``max_terms`` is set and only "sparse" kept.
        tokenizer: of the encoder; its ``queries`` or ``documents`` are used.
        texts: at least one.
        side: which of the two.
        batch_tokens: bound of sequences times longest sequence in a batch; a single sequence may
            exceed it.
        batch_sequences: bound of the sequences in a batch, and so of the dense ``[N, V]``.
        precision: "fp32", or "bf16" or "fp16" to encode under autocast of that kind.
        kinds: what to keep; None for all that the encoder gives.
        max_terms: keep this many of a text's largest weights; None for all.
        vector_dtype: in which token vectors are stored; see :class:`TokenRows`.
        progress: label of a progress bar on standard error; None for no bar.

    Raises:
        ValueError: no texts, a precision that does not exist, an encoder that does not give one of
            the ``kinds``, ``max_terms`` without sparse vectors, or representations that are not
            finite.
    """
    if not texts:
        raise ValueError("there are no texts to encode")
    kept = _checked_kinds(encoder, kinds, side, max_terms)
    order = np.argsort([-len(text) for text in texts], kind="stable")
    starts = range(0, len(order), _TEXTS_TOKENIZED_AT_ONCE)
    groups = [order[start : start + _TEXTS_TOKENIZED_AT_ONCE] for start in starts]
    tokenize = tokenizer.queries if side == "query" else tokenizer.documents
    parts: list[EncodedTexts] = []
    with evaluating(encoder, precision) as device, progress_bar(progress, len(texts)) as advance:
        for tokens in _ahead(lambda rows: tokenize([texts[row] for row in rows]), groups):
            for first, last in _batches(tokens.cu_seqlens, batch_tokens, batch_sequences):
                batch = tokens.select(first, last).to(device, non_blocking=True)
                parts.append(_encode(encoder, batch, side, kept, max_terms, vector_dtype))
                advance(last - first)
    encoded = EncodedTexts.concatenate(parts)
    parts.clear()
    return encoded.take(np.argsort(order))


def autocast_dtype(precision: object) -> torch.dtype | None:
    """The dtype of autocast; None for fp32, without.

    Raises:
        ValueError: a precision that does not exist.
    """
    if precision not in AUTOCAST:
        raise ValueError(f"precision={precision}: must be {', '.join(AUTOCAST)}")
    return AUTOCAST[str(precision)]


@contextmanager
def evaluating(encoder: nn.Module, precision: str = "fp32") -> Iterator[torch.device]:
    """The encoder's device; inside, the encoder is in evaluation mode and nothing has a gradient.
    Afterwards its mode is what it was."""
    device, dtype = device_of(encoder), autocast_dtype(precision)
    was_training = encoder.training
    encoder.eval()
    try:
        # Not inference mode: a model may cache tensors here that training later differentiates.
        with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            yield device
    finally:
        encoder.train(was_training)


def _encode(
    encoder: Any,
    tokens: TokenBatch,
    side: Side,
    kinds: Collection[Kind],
    max_terms: int | None,
    vector_dtype: VectorDtype,
) -> EncodedTexts:
    if max_terms is not None and set(kinds) == {"sparse"} and hasattr(encoder, "topk"):
        values, indices = encoder.topk(tokens, side, max_terms)
        rows = SparseRows.from_topk(values, indices, encoder.vocabulary_size)
        return EncodedTexts(_comparable(encoder, rows))
    given: Representations = encoder.encode(tokens, side)
    sparse = given.sparse if "sparse" in kinds else None
    assert not isinstance(sparse, SparseVectors), "encoders give all entries"
    vectors = given.tokens if "tokens" in kinds else None
    return EncodedTexts(
        None if sparse is None else _comparable(encoder, _sparse_rows(sparse, max_terms)),
        None if vectors is None else TokenRows.from_vectors(vectors, vector_dtype),
    )


def _comparable(encoder: Any, rows: SparseRows) -> SparseRows:
    """Rows whose dot products are the encoder's similarities."""
    return rows.normalized() if encoder.similarity == "cosine" else rows


def _checked_kinds(
    encoder: Any, kinds: Collection[Kind] | None, side: Side, max_terms: int | None
) -> Collection[Kind]:
    """The kinds to keep, all of which the encoder gives."""
    name = type(encoder).__name__
    for kind in kinds or ():
        if kind not in encoder.kinds:
            raise ValueError(f"{name} gives no {KINDS[kind]}")
    kept = encoder.kinds if kinds is None else kinds
    if max_terms is not None and "sparse" not in kept:
        raise ValueError(
            f"max_{side}_terms={max_terms} keeps a text's largest weights, but of {name} there "
            f"are {KINDS['tokens']} alone: leave it out"
        )
    return kept


def _sparse_rows(reps: torch.Tensor, max_terms: int | None) -> SparseRows:
    if max_terms is None:
        return SparseRows.from_dense(reps)
    # Stable: of equal weights the lower term is kept, on every device.
    values, terms = reps.sort(dim=1, descending=True, stable=True)
    return SparseRows.from_topk(values[:, :max_terms], terms[:, :max_terms], reps.shape[1])


def _batches(cu_seqlens: torch.Tensor, most_tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of sequences within both bounds, never empty."""
    start = longest = 0
    lengths = cu_seqlens.diff().clamp(min=1).tolist()
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if row > start and (row - start == most or (row + 1 - start) * longest > most_tokens):
            yield start, row
            start, longest = row, length
    yield start, len(lengths)


def _ahead(
    function: Callable[[NDArray[np.int64]], TokenBatch], items: Sequence[NDArray[np.int64]]
) -> Iterator[TokenBatch]:
    """``map``, with the next item computed in a thread while the caller uses the last one."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(function, items[0])
        for item in items[1:]:
            ready = coming.result()
            coming = thread.submit(function, item)
            yield ready
        yield coming.result()


def device_of(encoder: nn.Module) -> torch.device:
    return next(encoder.parameters()).device
