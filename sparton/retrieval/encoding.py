"""Encoding whole collections. N texts, V vocabulary."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from sparton.retrieval.sparse import SparseRows
from sparton.types import TokenBatch

_TEXTS_TOKENIZED_AT_ONCE = 2048


def encode_texts(
    encoder: nn.Module,
    tokenize: Callable[[Sequence[str]], TokenBatch],
    texts: Sequence[str],
    *,
    batch_tokens: int = 16_384,
    batch_sequences: int = 256,
    bf16: bool = False,
    max_terms: int | None = None,
    progress: str | None = None,
) -> SparseRows:
    """Representations of ``texts``, in their order; no dense matrix outlives its batch.

    Long texts come first, so that a batch too large for the device shows at once, and texts of
    like length share a batch. A thread tokenises ahead of the encoder.

    Args:
        encoder: packed tokens to fp32 ``[N, V]``; with ``max_terms`` also ``topk`` and
            ``vocabulary_size`` as :class:`~sparton.models.splade.SpladeEncoder` has them.
        tokenize: texts to packed tokens: a ``PackedTokenizer``'s ``queries`` or ``documents``.
        texts: at least one.
        batch_tokens: bound of sequences times longest sequence in a batch; a single sequence may
            exceed it.
        batch_sequences: bound of the sequences in a batch, and so of the dense ``[N, V]``.
        bf16: encode under bfloat16 autocast.
        max_terms: keep this many of a text's largest weights; None for all.
        progress: label of a progress bar on standard error; None for no bar.
    """
    if not texts:
        raise ValueError("there are no texts to encode")
    order = np.argsort([-len(text) for text in texts], kind="stable")
    starts = range(0, len(order), _TEXTS_TOKENIZED_AT_ONCE)
    groups = [order[start : start + _TEXTS_TOKENIZED_AT_ONCE] for start in starts]
    device = device_of(encoder)
    parts: list[SparseRows] = []
    was_training = encoder.training
    encoder.eval()
    try:
        # Not inference mode: a model may cache tensors here that training later differentiates.
        with torch.no_grad(), _progress(progress, len(texts)) as advance:
            for tokens in _ahead(lambda rows: tokenize([texts[row] for row in rows]), groups):
                for first, last in _batches(tokens.cu_seqlens, batch_tokens, batch_sequences):
                    batch = tokens.select(first, last).to(device, non_blocking=True)
                    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                        parts.append(_encode(encoder, batch, max_terms))
                    advance(last - first)
    finally:
        encoder.train(was_training)
    return SparseRows.concatenate(parts).take(np.argsort(order))


def _encode(encoder: Any, tokens: TokenBatch, max_terms: int | None) -> SparseRows:
    if max_terms is None:
        return SparseRows.from_dense(encoder(tokens))
    values, indices = encoder.topk(tokens, max_terms)
    return SparseRows.from_topk(values, indices, encoder.vocabulary_size)


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


@contextmanager
def _progress(label: str | None, total: int) -> Iterator[Callable[[int], None]]:
    """A function that moves a bar on; the bar is on standard error, or not at all. A terminal is
    cleared of it at the end, a log keeps the full bar."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    brief = console.is_terminal
    with Progress(*columns, console=console, transient=brief, disable=label is None) as bar:
        task = bar.add_task(label or "", total=total)
        yield lambda steps: bar.advance(task, steps)


def device_of(encoder: nn.Module) -> torch.device:
    return next(encoder.parameters()).device
