"""Batches of texts on their way through an encoder, whose device always has the next one.

N texts, V terms.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparton.kernels.dispatch import autocast_dtype
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.overlapping import Overlapping
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.pooling import pool_tokens
from sparton.retrieval.storing import NotFiniteError, Transfer, VectorDtype, store_tokens
from sparton.types import Kind, Side, TokenBatch, TokenPooling

log = logging.getLogger(__name__)

_TOKENS = {"cuda": 2**18}, 2**12  # of a batch, by kind of device, and of any other
_STATES = 2**28  # numbers of a layer's states of a batch: of widths beyond 1,024 fewer tokens
_ENTRIES = {"cuda": 2**26}, 2**23  # of the dense matrix of a batch
_NARROWEST = 2**12  # columns that it counts with at least: sequences have a bound without any, too
_AHEAD = {"cuda": 2}  # batches that a device is given before the host looks at one
_READY = 4  # items that are computed before they are asked for, groups of texts mostly
_TURN = 5e-4  # seconds that a thread may run Python while others wait to

Item = TypeVar("Item")


_turns = Overlapping()  # of the interpreter's threads: several may encode


def _shorten_turns() -> Callable[[], None]:
    """Let threads take turns ten times as often as usual; what is given undoes it."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, _TURN))
    return partial(sys.setswitchinterval, usual)


@contextmanager
def ahead(items: Iterator[Item]) -> Iterator[Iterator[Item]]:
    """The same items, none of them None, computed in a thread: the next four while the caller uses
    the last one. At the end of the block nothing of them runs any more.

    Meanwhile threads take shorter turns: one that was waiting for a device, or for another process,
    would go on only when the one that tokenises has had its 5 milliseconds."""

    def found() -> Iterator[Item]:
        while (item := coming.popleft().result()) is not None:
            coming.append(thread.submit(next, items, None))
            yield item

    with _turns.within(sys, _shorten_turns), ThreadPoolExecutor(1) as thread:
        coming = deque(thread.submit(next, items, None) for _ in range(_READY))
        try:
            yield found()
        finally:
            thread.shutdown(cancel_futures=True)


def encode_batches(
    encoder: Any,
    device: torch.device,
    groups: Iterable[TokenBatch],
    side: Side,
    kinds: Collection[Kind],
    *,
    batch_tokens: int | None,
    max_terms: int | None,
    vector_dtype: VectorDtype,
    pooling: TokenPooling | None,
) -> Iterator[Representations]:
    """Representations of consecutive texts on the host, batch after batch; a GPU has its next batch
    before the host looks at the last one, whichever groups these are of.

    Args:
        encoder: in evaluation mode, as within :func:`~sparton.retrieval.encoding.evaluating`.
        device: of the encoder.
        groups: tokens of texts. A batch is of one group.
        side, batch_tokens, max_terms, vector_dtype: see
            :func:`~sparton.retrieval.encoding.encode_texts`.
        kinds: what to keep; the encoder gives all of it.
        pooling: of the token vectors; None to keep all.

    Raises:
        ValueError: representations that are not finite.
    """
    travels_as = vector_dtype if pooling is None else "float32"
    flight: deque[_Launched] = deque()

    def launch(batch: TokenBatch) -> Transfer:
        return _launch(encoder, batch, side, kinds, max_terms, travels_as)

    def arrived(ahead: int) -> Iterator[Representations]:
        for part in _arrived(flight, ahead, launch):
            yield _finished(encoder, part, pooling, vector_dtype)

    bounds = _bounds(encoder, kinds, device, batch_tokens)
    for tokens in groups:
        for first, last in _batches(tokens.cu_seqlens, *bounds):
            batch = tokens.select(first, last)
            if device.type == "cuda":  # a copy from memory that is not pinned waits for the GPU
                batch = batch.pin_memory().to(device, non_blocking=True)
            flight.append(_Launched(batch, launch(batch)))
            yield from arrived(_AHEAD.get(device.type, 0))
    yield from arrived(0)


def gather_texts(
    batches: Iterator[Representations], num_texts: int, advance: Callable[[int], None]
) -> list[Representations]:
    """The batches that hold the next ``num_texts`` texts; ``advance`` is told of each how many."""
    found: list[Representations] = []
    while num_texts:
        found.append(next(batches))
        num_texts -= found[-1].num_texts
        advance(found[-1].num_texts)
    return found


def _launch(
    encoder: Any,
    tokens: TokenBatch,
    side: Side,
    kinds: Collection[Kind],
    max_terms: int | None,
    vector_dtype: VectorDtype,
) -> Transfer:
    """Encode a batch; the host does not wait for it."""
    if max_terms is not None and set(kinds) == {"sparse"} and hasattr(encoder, "topk"):
        values, terms = encoder.topk(tokens, side, max_terms)
        return _of_terms(values, terms, encoder.vocabulary_size)
    given: Representations = encoder.encode(tokens, side)
    vectors = (
        given.tokens if "tokens" in kinds else None,
        given.dense if "dense" in kinds else None,
    )
    if "sparse" not in kinds:
        return Transfer(None, *vectors, vector_dtype=vector_dtype)
    assert isinstance(given.sparse, Tensor), "encoders give all entries"
    width = given.sparse.shape[1]
    if max_terms is None:
        return Transfer(given.sparse, *vectors, width=width, vector_dtype=vector_dtype)
    # Stable: of equal weights the lower term is kept, on every device.
    values, terms = given.sparse.sort(dim=1, descending=True, stable=True)
    largest = values[:, :max_terms], terms[:, :max_terms]
    return _of_terms(*largest, width, *vectors, vector_dtype=vector_dtype)


def _of_terms(
    values: Tensor,
    terms: Tensor,
    width: int,
    *vectors: TokenVectors | None,
    vector_dtype: VectorDtype = "float16",
) -> Transfer:
    """Take the entries ``values [N, k]`` at ``terms [N, k]``, which differ within a text."""
    terms, order = terms.sort(1)
    values = values.gather(1, order)
    return Transfer(values, *vectors, terms=terms, width=width, vector_dtype=vector_dtype)


class _Launched(NamedTuple):
    """A batch on the device, and its representations on their way from there."""

    batch: TokenBatch
    transfer: Transfer


def _arrived(
    flight: "deque[_Launched]", ahead: int, launch: Callable[[TokenBatch], Transfer]
) -> Iterator[Representations]:
    """What has reached the host of the batches that were launched, while the device is at the last
    ``ahead`` of them; a batch that overflowed fp16 is launched again in bfloat16."""
    if ahead and len(flight) > 1:
        flight[-2].transfer.compact()
    while len(flight) > ahead:
        batch, transfer = flight.popleft()
        try:
            found = transfer.finish()
        except NotFiniteError:
            if autocast_dtype(batch.input_ids) != torch.float16:
                raise
            log.info("a batch overflows fp16 and is encoded in bf16")
            with torch.autocast(batch.input_ids.device.type, dtype=torch.bfloat16):
                found = launch(batch).finish()
        yield found


def _finished(
    encoder: Any, encoded: Representations, pooling: TokenPooling | None, dtype: VectorDtype
) -> Representations:
    """Sparse vectors whose dot products are the encoder's similarities, and token vectors that are
    pooled."""
    sparse, tokens, dense = encoded.sparse, encoded.tokens, encoded.dense
    if encoder.similarity == "cosine" and isinstance(sparse, SparseVectors):
        sparse = sparse.normalized()
    if pooling is not None:  # vectors have come in fp32
        tokens = tokens and store_tokens(pool_tokens(tokens, pooling), dtype)
        dense = dense and store_tokens(dense, dtype)
    return encoded._replace(sparse=sparse, tokens=tokens, dense=dense)


def _bounds(
    encoder: Any, kinds: Collection[Kind], device: torch.device, batch_tokens: int | None
) -> tuple[int, int]:
    """The most tokens of a batch, and the most sequences."""
    tokens, entries = (of.get(device.type, other) for of, other in (_TOKENS, _ENTRIES))
    tokens = min(tokens, _STATES // _hidden_size(encoder))
    width = getattr(encoder, "vocabulary_size", 0) if "sparse" in kinds else 0
    return batch_tokens or tokens, max(entries // max(width, _NARROWEST), 1)


def _hidden_size(encoder: Any) -> int:
    """The width of the states between its layers, of the documents' model where queries have
    another; 1 where there is none."""
    body = getattr(getattr(encoder, "document", encoder), "backbone", None)
    return getattr(body, "hidden_size", 1)


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
