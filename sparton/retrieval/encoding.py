"""Encoding whole collections. N texts, V terms."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sparton.arguments import (
    ArgumentError,
    refuse_below,
    refuse_lone_text,
    refuse_other,
    refuse_uncounted,
)
from sparton.overlapping import Overlapping
from sparton.products import keeping_weights
from sparton.representations import KINDS, Representations
from sparton.retrieval.batches import ahead, encode_batches, gather_texts
from sparton.retrieval.crew import ALONE, Crew, Gathering
from sparton.retrieval.ordering import in_order
from sparton.retrieval.progress import progress_bar
from sparton.retrieval.storing import VectorDtype, check_vector_dtype
from sparton.types import SIDES, Kind, Side, TextForm, TokenBatch, Tokenizer, TokenPooling

AUTOCAST = {
    "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16,
}  # fmt: skip
# Texts of a group, which is tokenised at once: each of the first ones has twice as many as the one
# before, since a device waits for them. Several processes have groups in turn, and whatever their
# number is, batches are the same.
_LARGEST_GROUP, _SMALLEST_GROUP, _GROUPS, _FIRST_GROUP = 1024, 256, 16, 64


def encode_texts(
    encoder: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    side: Side,
    *,
    batch_tokens: int | None = None,
    precision: str | None = None,
    kinds: Collection[Kind] | None = None,
    max_terms: int | None = None,
    vector_dtype: VectorDtype = "float16",
    pool_factor: float | None = None,
    form: TextForm = TextForm(),  # noqa: B008
    progress: str | None = None,
    crew: Crew = ALONE,
) -> Representations:
    """Representations of ``texts`` on the host, in their order; no dense matrix outlives its batch.

    The sparse half holds active entries alone, of length 1 where the encoder's are compared by
    cosine. Of token vectors those are kept that take part in MaxSim. Queries say how the scores of
    the encoder's halves are added up.

    Long texts come first, so that a batch too large for the device shows at once, and texts of
    like length share a batch. A thread tokenises ahead of the encoder. A GPU has its next batch
    before the host looks at the last one.

    Args:
        encoder: an :class:`~sparton.models.encoder.Encoder`. If it has ``topk`` and
            ``vocabulary_size`` as :class:`~sparton.models.splade.SpladeEncoder` has them, these
            spare it the dense representations where ``max_terms`` is set and only "sparse" kept.
        tokenizer: of the encoder; its ``queries`` or ``documents`` are used.
        texts: at least one, in anything that has a length and gives a text by its number.
        side: which of the two.
        batch_tokens: bound of sequences times longest sequence in a batch, which a single sequence
            may exceed; None for 262,144 on a GPU, fewer where states are wider than 1,024, and
            4,096 on a CPU, whose caches hold no more.
            The dense ``[N, V]`` of a batch has a bound in any case, 256 MiB on a GPU and 32 MiB on
            a CPU.
        precision: "fp32", or "bf16" or "fp16" to encode under autocast of that kind, or "fp8" for
            bf16 with the products of BERT's and RoBERTa's layers in FP8; None for
            :func:`usual_precision`. Batches that overflow fp16 are encoded in bf16.
        kinds: what to keep; None for all that the encoder gives.
        max_terms: keep this many of a text's largest weights; None for all.
        vector_dtype: in which token vectors and dense vectors are stored; see
            :func:`~sparton.retrieval.storing.store_tokens`.
        pool_factor: of so many tokens of a document one vector is stored, see
            :func:`~sparton.retrieval.pooling.pool_tokens`; 1 for all, None for what the encoder's
            head says. Queries keep all.
        form: lengths and prompts in place of the tokenizer's own.
        progress: label of a progress bar on standard error; None for no bar.
        crew: processes with the same encoder, of which each encodes some of the texts. The first
            gets all representations, to the bit those that it makes alone on such a device; the
            others get ``Representations()``.

    Raises:
        ValueError: no texts, a lone text in place of several, a side, a precision or a
            ``vector_dtype`` that does not exist, an encoder that does not give one of the
            ``kinds``, ``batch_tokens`` below 1, ``max_terms`` below 1 or without sparse vectors,
            ``pool_factor`` below 1 or without token vectors, or representations that are not
            finite.
    """
    refuse_lone_text(texts)
    if len(texts) == 0:
        raise ValueError("there are no texts to encode")
    refuse_other(SIDES, side=side)
    refuse_uncounted(1, batch_tokens=batch_tokens, max_terms=max_terms)
    check_vector_dtype(vector_dtype)
    kept = _checked_kinds(encoder, kinds, side, max_terms)
    check_pool_factor(pool_factor, kept, encoder)
    pooling = usual_pooling(encoder, side, pool_factor)
    order = longest_first(texts)
    groups = groups_of(order, first=_FIRST_GROUP)
    own = groups[crew.rank :: crew.size]

    def tokenize(few: Sequence[str]) -> TokenBatch:
        return (tokenizer.queries if side == "query" else tokenizer.documents)(few, form)

    tokenized = (tokenize([texts[row] for row in rows]) for rows in own)
    with (
        evaluating(encoder, precision) as device,
        progress_bar(progress, len(texts)) as advance,
        Gathering(crew, len(groups), advance) as gathering,
        # A thread of its own would take a lone query two milliseconds.
        ahead(tokenized) if len(own) > 1 else nullcontext(tokenized) as coming,
    ):
        batches = encode_batches(
            encoder,
            device,
            coming,
            side,
            kept,
            batch_tokens=batch_tokens,
            max_terms=max_terms,
            vector_dtype=vector_dtype,
            pooling=pooling,
        )
        for rows in own:
            gathering.add(gather_texts(batches, len(rows), advance))
        encoded = gathering.all()
    if not encoded:
        return Representations()
    weights = getattr(encoder, "score_weights", {}) if side == "query" else {}
    return in_order(encoded, order)._replace(score_weights=weights)


def longest_first(texts: Sequence[str]) -> NDArray[np.int64]:
    """The order in which texts are encoded: row numbers, int64 ``[N]``."""
    return np.argsort([-len(text) for text in texts], kind="stable")


def groups_of(order: NDArray[np.int64], first: int | None = None) -> list[NDArray[np.int64]]:
    """Consecutive rows that are tokenised at once; batches end where they do. The ``first`` group
    has so many rows, each after it twice as many as the one before, up to the usual number; None
    begins with that."""
    usual, ends = _group_size(len(order)), []
    size = min(first or usual, usual)
    end = size
    while end < len(order):
        ends.append(end)
        size = min(2 * size, usual)
        end += size
    return np.split(order, ends)


def _group_size(num_texts: int) -> int:
    """Enough groups for several processes, where there are enough texts for them."""
    return min(max(num_texts // _GROUPS, _SMALLEST_GROUP), _LARGEST_GROUP)


def usual_precision(encoder: nn.Module) -> str:
    """In which precision an encoder encodes where nothing else is said: on a CPU in fp32, on a GPU
    in 16 bits, fp16 unless it has weights in bfloat16; with adapters of LoRA beside frozen weights
    in bfloat16, in bf16 anywhere."""
    if device_of(encoder).type != "cuda":
        return "bf16" if _has_adapters_beside_half(encoder) else "fp32"
    half = any(parameter.dtype == torch.bfloat16 for parameter in encoder.parameters())
    return "bf16" if half else "fp16"


def _has_adapters_beside_half(encoder: nn.Module) -> bool:
    """Whether frozen weights are in bfloat16 and others are not: in fp32 they have no products."""
    weights = [*encoder.parameters()]
    frozen = any(each.dtype == torch.bfloat16 and not each.requires_grad for each in weights)
    return frozen and any(each.dtype == torch.float32 and each.requires_grad for each in weights)


def check_precision(precision: object, encoder: Any = None) -> None:
    """Refuse a precision that does not exist, or that an encoder does not have; None is the usual
    one.

    Raises:
        ValueError: names it.
    """
    if precision is not None:
        _refuse_precision(precision, encoder)
    if encoder is not None and precision == "fp8":
        with encoder.multiplying_in_fp8():
            pass


def _refuse_precision(precision: object, encoder: nn.Module | None) -> None:
    refuse_other(AUTOCAST, precision=precision)
    if precision == "fp32" and encoder is not None and _has_adapters_beside_half(encoder):
        raise ArgumentError(
            "{precision} has no products with the frozen weights beside adapters (LoRA), which are "
            "in bf16: choose bf16 as {precision:name}, or fp32 as the dtype of the adapters' "
            "settings",
            precision=precision,
        )


_modes = Overlapping()  # of encoders


@contextmanager
def evaluating(encoder: Any, precision: str | None = None) -> Iterator[torch.device]:
    """The encoder's device; inside, the encoder is in evaluation mode, nothing has a gradient, and
    next to a GPU torch has one thread on the host: copies of a batch wait longer for many threads
    than they take, where other processes have the cores. Afterwards all is as it was."""
    device = device_of(encoder)
    if precision is None:
        precision = usual_precision(encoder)
    else:
        _refuse_precision(precision, encoder)
    dtype = AUTOCAST[precision]
    in_fp8 = encoder.multiplying_in_fp8() if precision == "fp8" else nullcontext()
    threads = torch.get_num_threads()
    if device.type == "cuda":
        torch.set_num_threads(1)
    try:
        # Not inference mode: a model may cache tensors here that training later differentiates.
        with (
            _modes.within(encoder, partial(_evaluate, encoder)),  # several threads may encode
            torch.no_grad(),
            torch.autocast(device.type, dtype=dtype, enabled=dtype is not None),
            keeping_weights(encoder),
            in_fp8,
        ):
            yield device
    finally:
        torch.set_num_threads(threads)


def _evaluate(encoder: Any) -> Callable[[], None]:
    """Put an encoder into evaluation mode; what is given puts it back."""
    undo = partial(encoder.train, encoder.training)
    encoder.eval()
    return undo


def _checked_kinds(
    encoder: Any, kinds: Collection[Kind] | None, side: Side, max_terms: int | None
) -> Collection[Kind]:
    """The kinds to keep, all of which the encoder gives."""
    name = type(encoder).__name__
    if kinds is not None and not kinds:
        raise ValueError(f"kinds is empty: name {' or '.join(encoder.kinds)}, or leave it out")
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


def check_pool_factor(pool_factor: float | None, kinds: Collection[Kind], encoder: object) -> None:
    """Refuse to pool what there is not.

    Raises:
        ValueError: below 1, or without token vectors among the ``kinds`` of an encoder.
    """
    refuse_below(1, pool_factor=pool_factor)
    if pool_factor is not None and "tokens" not in kinds:
        raise ValueError(
            f"pool_factor={pool_factor} leaves fewer token vectors, but of "
            f"{type(encoder).__name__} there are {KINDS['sparse']} alone: leave it out"
        )


def usual_pooling(encoder: Any, side: Side, pool_factor: float | None) -> TokenPooling | None:
    """How token vectors of a side are pooled, by the encoder's head where nothing else is said;
    None where all are stored."""
    pooling: TokenPooling = getattr(encoder, "token_pooling", TokenPooling())
    if pool_factor is not None:
        pooling = pooling._replace(factor=pool_factor)
    return pooling if side == "document" and pooling.factor > 1 else None


def device_of(encoder: nn.Module) -> torch.device:
    return next(encoder.parameters()).device
