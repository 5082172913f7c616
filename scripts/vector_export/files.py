"""The files that hold exported vectors, written part by part."""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparton.retrieval.encoding import EncodedTexts
from sparton.retrieval.output import writing
from sparton.retrieval.sparse import SparseRows, boundaries_of
from sparton.retrieval.tokens import TokenRows

HEADER = 512  # bytes kept for the description of the tensors, which is known last
DTYPES = {"float16": "F16", "float32": "F32"}


class Part(NamedTuple):
    """Some consecutive texts, and what an encoder made of them."""

    ids: list[str]
    texts: list[str]
    encoded: EncodedTexts


class Written(NamedTuple):
    """How many texts and entries (weights or token vectors) there are, and texts without any."""

    texts: int
    entries: int
    empty: int

    @classmethod
    def count(cls, lengths: np.ndarray) -> "Written":
        return cls(len(lengths), int(lengths.sum()), int((lengths == 0).sum()))


def write_sparse(
    file: Path,
    parts: Iterable[Part],
    names: Sequence[str],
    *,
    compress: bool,
    quantize: int | None = None,
    contents: bool = False,
) -> Written:
    """One JSON object per line: ``id``, perhaps ``contents``, and ``vector``, which maps terms to
    weights.

    A weight has the fewest digits that give the same fp32 number.

    Args:
        file: to write.
        parts: with sparse vectors.
        names: of the V terms, all different.
        compress: by gzip.
        quantize: N to write ``round(N * weight)``, without zeros; None for the weights.
        contents: write the texts, too.
    """
    keys = [json.dumps(name, ensure_ascii=False) for name in names]
    lengths = [np.zeros(0, np.int64)]
    with writing(file, compress=compress) as sink:
        for part in parts:
            assert part.encoded.sparse is not None
            rows = part.encoded.sparse
            if quantize is not None:
                rows = quantized(rows, quantize)
            for record, vector in zip(_records(part, contents), _vectors(rows, keys)):
                sink.write(f'{record[:-1]}, "vector": {{{vector}}}}}\n'.encode())
            lengths.append(rows.row_lengths)
    return Written.count(np.concatenate(lengths))


def quantized(rows: SparseRows, factor: int) -> SparseRows:
    """Whole numbers ``round(factor * weight)``, int64 and without zeros; halves become even."""
    values = np.rint(factor * rows.values.astype(np.float64)).astype(np.int64)
    kept = values != 0
    owners = np.repeat(np.arange(rows.num_rows), rows.row_lengths)[kept]
    indptr = boundaries_of(np.bincount(owners, minlength=rows.num_rows))
    return SparseRows(indptr, rows.indices[kept], values[kept], rows.width)


def write_tokens(file: Path, parts: Iterable[Part], number: int) -> Written:
    """A safetensors file of ``vectors [T, E]``, float16 or float32, and ``cu_seqlens [N + 1]``,
    int64; text n owns the rows ``cu_seqlens[n] : cu_seqlens[n + 1]``.

    Only the lengths are kept in memory: the vectors follow the place of ``cu_seqlens``, which is
    filled in last.

    Args:
        file: to write.
        parts: with token vectors, of at least one text.
        number: N.
    """
    lengths: list[np.ndarray] = []
    with file.open("wb") as sink:
        sink.seek(8 + HEADER + 8 * (number + 1))
        for part in parts:
            assert part.encoded.tokens is not None
            rows = part.encoded.tokens
            sink.write(np.ascontiguousarray(rows.values).data)
            lengths.append(rows.row_lengths)
        bounds = boundaries_of(np.concatenate(lengths))
        sink.seek(0)
        sink.write(_header(rows, bounds))
        sink.write(bounds.data)
    return Written.count(np.diff(bounds))


def write_ids(file: Path, ids: Iterable[str]) -> None:
    """One per line.

    Raises:
        ValueError: an id that is not one line.
    """
    with file.open("w", encoding="utf-8", newline="\n") as sink:
        for identifier in ids:
            if identifier.splitlines() != [identifier]:
                raise ValueError(
                    f"the id {identifier!r} holds a line break, and ids are written one per line: "
                    "rename it in the file of texts"
                )
            sink.write(f"{identifier}\n")


def _header(rows: TokenRows, bounds: np.ndarray) -> bytes:
    """The length of the description, and the description, filled up with spaces."""
    start, T = bounds.nbytes, int(bounds[-1])
    stop = start + T * rows.width * rows.values.itemsize
    tensors = {
        "__metadata__": {"format": "pt"},
        "cu_seqlens": {"dtype": "I64", "shape": [len(bounds)], "data_offsets": [0, start]},
        "vectors": {
            "dtype": DTYPES[rows.values.dtype.name],
            "shape": [T, rows.width],
            "data_offsets": [start, stop],
        },
    }
    return struct.pack("<Q", HEADER) + json.dumps(tensors).encode().ljust(HEADER)


def _records(part: Part, contents: bool) -> Iterator[str]:
    """JSON objects without vectors."""
    for identifier, text in zip(part.ids, part.texts, strict=True):
        record = {"id": identifier} | ({"contents": text} if contents else {})
        yield json.dumps(record, ensure_ascii=False)


def _vectors(rows: SparseRows, keys: Sequence[str]) -> Iterator[str]:
    """The inside of a JSON object for every row."""
    for row in range(rows.num_rows):
        first, last = rows.indptr[row : row + 2]
        weights = rows.values[first:last].astype(str).tolist()
        terms = rows.indices[first:last].tolist()
        yield ", ".join(f"{keys[term]}: {weight}" for term, weight in zip(terms, weights))
