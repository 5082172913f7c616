"""Encoding whole collections. N texts, V terms."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparton.packing import cu_seqlens_of
from sparton.representations import KINDS, Representations, TokenVectors
from sparton.retrieval.progress import progress_bar
from sparton.sparse_vectors import SparseVectors
from sparton.types import SIDES, Kind, Side, TextForm, TokenBatch, Tokenizer

VectorDtype = Literal["float16", "float32"]
VECTOR_DTYPES: tuple[VectorDtype, ...] = ("float16", "float32")
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_TEXTS_TOKENIZED_AT_ONCE = 2048


def encode_texts(
    encoder: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    side: Side,
    *,
    batch_tokens: int | None = None,
    batch_sequences: int = 256,
    precision: str = "fp32",
    kinds: Collection[Kind] | None = None,
    max_terms: int | None = None,
    vector_dtype: VectorDtype = "float16",
    form: TextForm = TextForm(),  # noqa: B008
    progress: str | None = None,
) -> Representations:
    """Representations of ``texts`` on the host, in their order; no dense matrix outlives its batch.

    The sparse half holds active entries alone, of length 1 where the encoder's are compared by
    cosine. Of token vectors those are kept that take part in MaxSim.

    Long texts come first, so that a batch too large for the device shows at once, and texts of
    like length share a batch. A thread tokenises ahead of the encoder.

    Args:
        encoder: an :class:`~sparton.models.encoder.Encoder`. If it has ``topk`` and
            ``vocabulary_size`` as :class:`~sparton.models.splade.SpladeEncoder` has them, these
            spare it the dense representations where ``max_terms`` is set and only "sparse" kept.
        tokenizer: of the encoder; its ``queries`` or ``documents`` are used.
        texts: at least one, in anything that has a length and gives a text by its number.
        side: which of the two.
        batch_tokens: bound of sequences times longest sequence in a batch; a single sequence may
            exceed it.
        batch_sequences: bound of the sequences in a batch, and so of the dense ``[N, V]``.
        precision: "fp32", or "bf16" or "fp16" to encode under autocast of that kind.
        kinds: what to keep; None for all that the encoder gives.
        max_terms: keep this many of a text's largest weights; None for all.
        vector_dtype: in which token vectors are stored; see :func:`store_tokens`.
        form: lengths and prompts in place of the tokenizer's own.
        progress: label of a progress bar on standard error; None for no bar.

    Raises:
        ValueError: no texts, a lone text in place of several, a side or a precision that does not
            exist, an encoder that does not give one of the ``kinds``, ``max_terms`` below 1 or
            without sparse vectors, or representations that are not finite.
    """
    if isinstance(texts, str):
        raise ValueError(f"texts is the single text {texts[:40]!r}: put it into a list")
    if len(texts) == 0:
        raise ValueError("there are no texts to encode")
    if side not in SIDES:
        raise ValueError(f"side={side!r}: must be {' or '.join(SIDES)}")
    kept = _checked_kinds(encoder, kinds, side, max_terms)
    order = np.argsort([-len(text) for text in texts], kind="stable")
    starts = range(0, len(order), _TEXTS_TOKENIZED_AT_ONCE)
    groups = [order[start : start + _TEXTS_TOKENIZED_AT_ONCE] for start in starts]
    tokenize = tokenizer.queries if side == "query" else tokenizer.documents
    parts: list[Representations] = []
    with evaluating(encoder, precision) as device, progress_bar(progress, len(texts)) as advance:
        for tokens in _ahead(lambda rows: tokenize([texts[row] for row in rows], form), groups):
            for first, last in _batches(tokens.cu_seqlens, batch_tokens or 16_384, batch_sequences):
                batch = tokens.select(first, last).to(device, non_blocking=True)
                parts.append(_encode(encoder, batch, side, kept, max_terms, vector_dtype))
                advance(last - first)
    encoded = Representations.concatenate(parts)
    parts.clear()
    return encoded.take(torch.from_numpy(np.argsort(order)))


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


def store_sparse(sparse: Tensor | SparseVectors) -> SparseVectors:
    """The active entries of sparse vectors ``[N, V]`` of any float dtype, on the host.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    if isinstance(sparse, Tensor):
        sparse = SparseVectors.from_dense(sparse.float())
    stored = sparse.to("cpu")
    broken = (~stored.values.isfinite()).nonzero()
    if broken.numel():
        row = int(torch.searchsorted(stored.cu_seqlens, broken[0], right=True)) - 1
        raise ValueError(
            f"row {row} of a batch of representations has the weight {stored.values[broken[0, 0]]}:"
            " the model diverged or overflowed its precision; evaluate an earlier checkpoint, or "
            "in fp32"
        )
    return stored


def store_tokens(vectors: TokenVectors, dtype: VectorDtype = "float16") -> TokenVectors:
    """The token vectors that take part in MaxSim, on the host, without a mask.

    Half precision rounds a component by at most 2^-11 of its size: the MaxSim of vectors of length
    1 changes by less than 0.001 per query token, which reorders near ties only.

    Raises:
        ValueError: a component is NaN, infinite or too large for ``dtype``.
    """
    cu_seqlens, values = vectors.cu_seqlens.long(), vectors.values
    if vectors.mask is not None:
        cu_seqlens = cu_seqlens_of(vectors.mask)[cu_seqlens]
        values = values[vectors.mask]
    stored = values.to(getattr(torch, dtype))
    broken = (~stored.isfinite()).any(dim=1).nonzero().flatten()
    if broken.numel():
        text = int(torch.searchsorted(cu_seqlens, broken[0], right=True)) - 1
        worst = values[broken[0]].float().abs().max().item()
        cause = "the model diverged or overflowed its precision; evaluate an earlier checkpoint"
        if np.isfinite(worst):
            cause = f"{dtype} cannot hold it; store float32"
        raise ValueError(
            f"text {text} of a batch has a token vector with the component {worst:g}: {cause}"
        )
    return TokenVectors(stored.cpu(), cu_seqlens.cpu())


def _encode(
    encoder: Any,
    tokens: TokenBatch,
    side: Side,
    kinds: Collection[Kind],
    max_terms: int | None,
    vector_dtype: VectorDtype,
) -> Representations:
    if max_terms is not None and set(kinds) == {"sparse"} and hasattr(encoder, "topk"):
        values, terms = encoder.topk(tokens, side, max_terms)
        best = SparseVectors.from_topk(values, terms, encoder.vocabulary_size)
        return Representations(_comparable(encoder, store_sparse(best)))
    given: Representations = encoder.encode(tokens, side)
    sparse = given.sparse if "sparse" in kinds else None
    if sparse is not None and max_terms is not None:
        sparse = _largest(sparse, max_terms)
    vectors = given.tokens if "tokens" in kinds else None
    return Representations(
        None if sparse is None else _comparable(encoder, store_sparse(sparse)),
        None if vectors is None else store_tokens(vectors, vector_dtype),
    )


def _comparable(encoder: Any, vectors: SparseVectors) -> SparseVectors:
    """Vectors whose dot products are the encoder's similarities."""
    return vectors.normalized() if encoder.similarity == "cosine" else vectors


def _largest(sparse: Tensor | SparseVectors, max_terms: int) -> SparseVectors:
    assert isinstance(sparse, Tensor), "encoders give all entries"
    # Stable: of equal weights the lower term is kept, on every device.
    values, terms = sparse.sort(dim=1, descending=True, stable=True)
    return SparseVectors.from_topk(values[:, :max_terms], terms[:, :max_terms], sparse.shape[1])


def _checked_kinds(
    encoder: Any, kinds: Collection[Kind] | None, side: Side, max_terms: int | None
) -> Collection[Kind]:
    """The kinds to keep, all of which the encoder gives."""
    name = type(encoder).__name__
    for kind in kinds or ():
        if kind not in encoder.kinds:
            raise ValueError(f"{name} gives no {KINDS[kind]}")
    kept = encoder.kinds if kinds is None else kinds
    if max_terms is not None and max_terms < 1:
        raise ValueError(f"max_terms is {max_terms}, must be at least 1")
    if max_terms is not None and "sparse" not in kept:
        raise ValueError(
            f"max_{side}_terms={max_terms} keeps a text's largest weights, but of {name} there "
            f"are {KINDS['tokens']} alone: leave it out"
        )
    return kept


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
    """``map``, with the next item computed in a thread while the caller uses the last one; without
    one where there is nothing to compute ahead, which spares a lone query two milliseconds."""
    if len(items) == 1:
        yield function(items[0])
        return
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(function, items[0])
        for item in items[1:]:
            ready = coming.result()
            coming = thread.submit(function, item)
            yield ready
        yield coming.result()


def device_of(encoder: nn.Module) -> torch.device:
    return next(encoder.parameters()).device
