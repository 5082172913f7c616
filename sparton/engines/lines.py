"""Encoded texts as an engine takes them, part by part."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from sparton.encoded.collection import EncodedTexts
from sparton.engines.engine import Document, Engine, documents_of
from sparton.packing import ranges_of
from sparton.representations import Representations

_AT_ONCE = 256  # texts whose lines are in memory
_BYTES = 2**23  # of a request


class Batch(NamedTuple):
    """Some documents: their ids, and a line for each, see :meth:`Engine.line`."""

    ids: list[str]
    lines: list[bytes]


def shards_with_ids(texts: EncodedTexts) -> Iterator[tuple[list[str], Representations]]:
    """The shards of encoded texts, each with the ids of its texts."""
    ids = iter(texts.ids)
    for shard in texts.shards():
        yield list(islice(ids, shard.num_texts)), shard


def check_ids(engine: Engine, texts: EncodedTexts) -> None:
    """Refuse texts before any of them is written or sent.

    Raises:
        ValueError: an id that the engine does not take; names it.
    """
    for identifier in texts.ids:
        engine.check_id(identifier)


def batches(
    engine: Engine, ids: list[str], shard: Representations, together: int | None = None
) -> Iterator[Batch]:
    """The texts of a shard that have vectors, in requests of at most 8 MiB, or of one text.

    Args:
        together: how many documents make a batch; None for what fits.

    Raises:
        ValueError: a weight that the engine does not take; names it.
    """
    batch, size = Batch([], []), 0
    for rows in ranges_of(len(ids), _AT_ONCE):
        part = shard.slice(rows.start, rows.stop)
        for document in documents_of(ids[rows.start : rows.stop], part, engine.kinds):
            if document.terms is None and document.tokens is None:
                continue
            _check_weights(engine, document)
            line = engine.line(document)
            if batch.ids and (size + len(line) > _BYTES or len(batch.ids) == together):
                yield batch
                batch, size = Batch([], []), 0
            batch.ids.append(document.id)
            batch.lines.append(line)
            size += len(line)
    if batch.ids:
        yield batch


def count_with_vectors(engine: Engine, shard: Representations) -> int:
    """How many texts of a shard have vectors that are pushed."""
    halves = [getattr(shard, kind).lengths for kind in engine.kinds]
    return int((sum(halves) > 0).sum())


def _check_weights(engine: Engine, document: Document) -> None:
    """Engines drop or refuse weights that Lucene's fields cannot hold, and rank wrongly by them."""
    if document.weights is None or document.terms is None:
        return
    # What is false of NaN, too.
    wrong = ~((document.weights >= np.finfo(np.float32).tiny) & np.isfinite(document.weights))
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(
            f"the text {document.id!r} has the weight {document.weights[place]} for term "
            f"{document.terms[place]}: engines take positive weights alone, encode with a model "
            "whose weights are"
        )
