"""Encodes collections of any size into folders, by any number of processes that share a folder and
nothing else.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparton.arguments import refuse_below
from sparton.datasets.texts import TextList, TextTable
from sparton.datasets.tokenization import PackedTokenizer
from sparton.encoded.claims import PATIENCE, Watch, claimed
from sparton.encoded.collection import EncodedTexts, open_encoded
from sparton.encoded.facts import Facts, Settings, Shard, check_place, read_facts
from sparton.encoded.folders import Texts, begin_folder
from sparton.encoded.identity import encoder_digest
from sparton.encoded.shards import SHARDS, inspect_shard, shard_path, write_shard
from sparton.representations import KINDS, Representations
from sparton.retrieval.batches import ahead, encode_batches, gather_texts
from sparton.retrieval.encoding import (
    encode_texts,
    evaluating,
    groups_of,
    longest_first,
    usual_pooling,
    usual_precision,
)
from sparton.retrieval.ordering import in_order
from sparton.retrieval.progress import progress_bar
from sparton.retrieval.storing import VectorDtype
from sparton.types import Kind, Side, TokenBatch

if TYPE_CHECKING:
    from sparton.models.encoder import Encoder

_CLAIMS = "claims"
_POLL = 0.1  # seconds
# Texts of a shard, and the most tokens where each has a vector. Shards are the work that processes
# share, whose number must not change them: they are small, so that all processes end together.
_ROWS, _TOKENS = 2**14, 2**22


def plan_encoding(
    encoder: "Encoder",
    tokenizer: PackedTokenizer,
    side: Side = "document",
    *,
    output: Path | None = None,
    kinds: Collection[Kind] | None = None,
    max_terms: int | None = None,
    vector_dtype: VectorDtype = "float16",
    pool_factor: float | None = None,
    precision: str | None = None,
    rows_per_shard: int | None = None,
) -> Settings:
    """How :func:`encode_shards` will encode texts. One text is encoded to see what that gives.

    Args:
        encoder: of any kind.
        tokenizer: of the encoder, with the length at which texts are cut.
        side: encode texts as queries or as documents.
        output: the folder, whose shards say what ``rows_per_shard`` is where that is None.
        kinds: what to store; None for all that the encoder gives.
        max_terms: keep this many of a text's largest weights; None for all.
        vector_dtype: in which token vectors and dense vectors are stored.
        pool_factor: of so many tokens of a document one vector is stored; None for what the
            encoder's head says.
        precision: see :func:`~sparton.retrieval.encoding.encode_texts`.
        rows_per_shard: texts of a file; None for as many as those of ``output`` have, and where
            there is none for 16,384, or with token vectors fewer where texts are longer than 256
            tokens. Many more take much memory, a process that dies costs the file that it was at,
            and at the end processes wait for the last one.

    Raises:
        ValueError: an argument that cannot be, or that the encoder cannot serve.
    """
    refuse_below(1, rows_per_shard=rows_per_shard)
    if rows_per_shard is None and output is not None and check_place(output):
        rows_per_shard = read_facts(output).settings.rows_per_shard
    precision = precision or usual_precision(encoder)
    found = encode_texts(
        encoder,
        tokenizer,
        ["a"],
        side,
        kinds=kinds,
        max_terms=max_terms,
        vector_dtype=vector_dtype,
        pool_factor=pool_factor,
        precision=precision,
    )
    pooling = usual_pooling(encoder, side, pool_factor) if found.tokens is not None else None
    query = side == "query"
    length = tokenizer.query_length if query else tokenizer.document_length
    usual = _ROWS if found.tokens is None else max(min(_ROWS, _TOKENS // length), 1)
    return Settings(
        side=side,
        kinds=tuple(kind for kind in KINDS if kind in found.kinds),
        sparse_width=found.width,
        token_width=0 if found.tokens is None else found.tokens.width,
        dense_width=0 if found.dense is None else found.dense.width,
        max_terms=max_terms,
        vector_dtype=vector_dtype,
        pool_factor=1.0 if pooling is None else float(pooling.factor),
        length=length,
        prompt=tokenizer.markup.query_prompt if query else tokenizer.markup.document_prompt,
        precision=precision,
        model=encoder_digest(encoder),
        rows_per_shard=rows_per_shard or usual,
    )


def encode_shards(
    encoder: "Encoder",
    tokenizer: PackedTokenizer,
    texts: Texts,
    output: Path,
    facts: Facts,
    *,
    batch_tokens: int | None = None,
    rank: int = 0,
    workers: int = 1,
    progress: bool = True,
) -> None:
    """Encode what a folder lacks, together with all others that do so now, and return when it is
    complete. What a process that died was at is done by those that live.

    Args:
        encoder, tokenizer: of which the settings were made.
        texts: all texts of one part of the folder.
        output: the folder.
        facts: what :func:`begin_folder` gave.
        batch_tokens: see :func:`~sparton.retrieval.encoding.encode_texts`.
        rank, workers: of how many processes this is which: each begins with shards of its own.
        progress: show bars on standard error.

    Raises:
        ValueError: representations that are not finite, or a damaged shard.
        OSError: the disk is full or not writable.
    """
    settings = facts.settings
    part = [each.source for each in facts.parts].index(texts.digest)
    own = [shard for shard in facts.shards() if shard.part == part]
    for shard in own:
        if shard_path(output, shard).is_file():
            inspect_shard(output, shard, settings)
    watch = Watch()
    while missing := [shard for shard in own if not shard_path(output, shard).is_file()]:
        ordered = sorted(missing, key=lambda each: each.number % workers != rank)
        label = f"shard {{}} of {len(facts.shards())}" if progress else None
        done = _encode_free(
            encoder, tokenizer, texts, output, settings, ordered, batch_tokens, label
        )
        if not done:  # others are at all that is left
            for shard in missing:
                watch.drop_dead(output / _CLAIMS / str(shard.number))
            time.sleep(_POLL)
    _sweep(output)


class _Begun(NamedTuple):
    """A shard that is this process's own until it is written.

    Attributes:
        order: in which its texts are encoded.
        claim: what ends when it is written.
    """

    shard: Shard
    order: NDArray[np.int64]
    claim: ExitStack


def _encode_free(
    encoder: "Encoder",
    tokenizer: PackedTokenizer,
    texts: Texts,
    output: Path,
    settings: Settings,
    shards: Sequence[Shard],
    batch_tokens: int | None,
    label: str | None,
) -> bool:
    """Encode those of the shards that nobody else is at, and say whether there were any.

    While one is encoded, a thread reads and tokenises the texts that come next, of the next shard,
    too, and another one writes the last one: the device waits for neither.
    """
    begun: deque[_Begun] = deque()
    tokenize = tokenizer.queries if settings.side == "query" else tokenizer.documents

    def groups() -> Iterator[TokenBatch]:
        for shard in shards:
            claim = claims.enter_context(ExitStack())
            mine = claim.enter_context(claimed(output / _CLAIMS / str(shard.number)))
            if not mine or shard_path(output, shard).is_file():
                claim.close()
                continue
            own = texts.take(range(shard.start, shard.start + len(shard.rows))).texts
            order = longest_first(own)
            begun.append(_Begun(shard, order, claim))
            for rows in groups_of(order):
                yield tokenize([own[row] for row in rows])

    writing: Future[None] | None = None
    with (
        ExitStack() as claims,
        ThreadPoolExecutor(1) as writer,
        evaluating(encoder, settings.precision) as device,
        ahead(groups()) as coming,
    ):
        pool_factor = settings.pool_factor if "tokens" in settings.kinds else None
        batches = encode_batches(
            encoder,
            device,
            coming,
            settings.side,
            settings.kinds,
            batch_tokens=batch_tokens,
            max_terms=settings.max_terms,
            vector_dtype=settings.vector_dtype,
            pooling=usual_pooling(encoder, settings.side, pool_factor),
        )
        for first in batches:
            shard = begun.popleft()
            said = label and label.format(shard.shard.number + 1)
            with progress_bar(said, len(shard.order)) as advance:
                parts = gather_texts(chain([first], batches), len(shard.order), advance)
            if writing is not None:  # one at a time, so that memory has a bound
                writing.result()
            writing = writer.submit(_write, output, shard, parts)
        if writing is not None:
            writing.result()
    return writing is not None


def _write(output: Path, begun: _Begun, parts: list[Representations]) -> None:
    with begun.claim:
        write_shard(output, begun.shard, in_order(parts, begun.order))


def encode_collection(
    encoder: "Encoder",
    tokenizer: PackedTokenizer,
    texts: Texts | Sequence[str],
    output: str | Path,
    side: Side = "document",
    *,
    kinds: Collection[Kind] | None = None,
    max_terms: int | None = None,
    vector_dtype: VectorDtype = "float16",
    pool_factor: float | None = None,
    precision: str | None = None,
    rows_per_shard: int | None = None,
    batch_tokens: int | None = None,
    append: bool = False,
    name: str = "a model",
    progress: bool = True,
) -> EncodedTexts:
    """Encode texts into a folder; called again with the same arguments, it goes on where it was.

    Args:
        encoder, tokenizer, side, kinds, max_terms, vector_dtype: see :func:`plan_encoding`.
        pool_factor, precision, rows_per_shard: see there, too.
        texts, output, append, name: see :func:`begin_folder`; the ids of a list are row numbers.
        batch_tokens, progress: see :func:`encode_shards`.

    Raises:
        ValueError, OSError: from these functions.
    """
    if not isinstance(texts, TextTable | TextList):
        texts = TextList(texts)
    output = Path(output)
    settings = plan_encoding(
        encoder,
        tokenizer,
        side,
        output=output,
        kinds=kinds,
        max_terms=max_terms,
        vector_dtype=vector_dtype,
        pool_factor=pool_factor,
        precision=precision,
        rows_per_shard=rows_per_shard,
    )
    facts = begin_folder(output, settings, texts, name, append=append)
    encode_shards(
        encoder, tokenizer, texts, output, facts, batch_tokens=batch_tokens, progress=progress
    )
    return open_encoded(output)


def _sweep(output: Path) -> None:
    """Remove what processes that died have left in a complete folder: claims, shards in part, and
    of other files in part those that are old, as others may change the folder meanwhile."""
    shards, now = output / SHARDS, time.time()
    for path in (*output.glob("*.tmp"), *output.glob("*/*.tmp"), *shards.glob(".tmp*")):
        with suppress(FileNotFoundError):
            if path.parent == shards or now - path.stat().st_mtime > PATIENCE:
                path.unlink()
    with suppress(OSError):  # another process sweeps, too
        for path in (output / _CLAIMS).glob("*"):
            path.unlink(missing_ok=True)
        (output / _CLAIMS).rmdir()
