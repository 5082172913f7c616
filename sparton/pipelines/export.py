"""Writes the vectors of texts, by any model, for search elsewhere."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from sparton.arguments import ArgumentError, refuse_below
from sparton.datasets.texts import TextsByRow
from sparton.evaluation import check_model, choose_device, load_retriever
from sparton.models.csr import AutoencoderEncoder
from sparton.models.encoder import Encoder
from sparton.packing import ranges_of
from sparton.pipelines.vector_files import FORMATS, SparseFile, TokenFile, Written, format_of
from sparton.representations import KINDS, Representations
from sparton.retrieval.encoding import check_precision, encode_texts
from sparton.types import Side, TextCollection

PART = 16_384  # texts whose vectors are in memory at once


def export_vectors(
    model: str | Path | Encoder,
    texts: TextsByRow | Callable[[], TextsByRow],
    output: str | Path | SparseFile | TokenFile,
    side: Side,
    *,
    length: int | None = None,
    precision: str | None = None,
    device: str | None = None,
    progress: bool = True,
) -> Written:
    """Encode texts and write their vectors, in the order of the texts.

    The output appears when it is complete; an interrupted export starts again from the beginning.

    Args:
        model: of any kind, or its folder or hub name.
        texts: to encode, or what gives them, which is called when all else has been checked.
        output: file to write; a path stands for the format that its ending is for.
        side: encode the texts as queries or as documents.
        length: tokens at which texts are cut; None for the length that the model was trained with.
        precision: see :func:`~sparton.retrieval.encoding.encode_texts`.
        device: where the model runs, to which one that was loaded is moved; None for a GPU if there
            is one.
        progress: show bars on standard error.

    Raises:
        ValueError: an argument that cannot be, a model that gives no such vectors, or vectors or
            ids that cannot be written.
        OSError: there is no such model, or the disk is full or not writable.
    """
    file = output if isinstance(output, SparseFile | TokenFile) else format_of(output)(output)
    refuse_below(1, length=length)
    check_precision(precision)
    if not isinstance(model, Encoder):
        if str(model) == "bm25":
            raise ValueError("bm25 has no vectors to export: name a trained model")
        check_model(model)
    lengths = (length, None) if side == "query" else (None, length)
    encoder, tokenizer = load_retriever(model, *lengths, device=choose_device(device))
    if file.kind not in encoder.kinds:
        (given,) = encoder.kinds
        raise ArgumentError(
            "{} gives {} and no {}: name an {output:name} that ends in {}",
            type(encoder).__name__ if isinstance(model, Encoder) else model,
            KINDS[given],
            KINDS[file.kind],
            " or ".join(FORMATS[given].endings),
            output=file.path,
        )
    names = term_names(encoder) if isinstance(file, SparseFile) else []
    texts = texts() if callable(texts) else texts
    encode = partial(
        encode_texts, encoder, tokenizer, side=side, precision=precision, kinds=(file.kind,)
    )
    if isinstance(file, SparseFile):
        return file.write(_parts(texts, partial(encode, max_terms=file.max_terms), progress), names)
    parts = _parts(texts, partial(encode, vector_dtype=file.dtype), progress)
    ids = chain.from_iterable(texts.take(rows).ids for rows in ranges_of(len(texts), PART))
    return file.write(parts, ids, len(texts))


def _parts(
    texts: TextsByRow, encode: Callable[..., Representations], progress: bool
) -> Iterator[tuple[TextCollection, Representations]]:
    ranges = ranges_of(len(texts), PART)
    for number, rows in enumerate(ranges, 1):
        part = texts.take(rows)
        label = f"vectors, part {number} of {len(ranges)}" if progress else None
        yield part, encode(part.texts, progress=label)


def term_names(encoder: Any) -> list[str]:
    """What the columns of sparse vectors are called: tokens, or the numbers of latents. Rows
    beyond the tokenizer, which pad a vocabulary, are called after their number.

    Raises:
        ValueError: two columns share a name.
    """
    columns = range(encoder.vocabulary_size)
    if isinstance(encoder, AutoencoderEncoder):
        return [str(column) for column in columns]
    tokens = encoder.term_names(columns)
    names = [f"[row {column}]" if name is None else name for column, name in enumerate(tokens)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the model's tokenizer has two tokens {twice!r}: rename one of them")
    return names
