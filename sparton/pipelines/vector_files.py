"""The files that hold exported vectors, written part by part.

N texts, V terms, T token vectors in all, E their width.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sparton.arguments import ArgumentError, refuse_below, refuse_other
from sparton.kernels.boundaries import cu_seqlens_of, sequence_ids
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import KINDS, Representations, TokenVectors
from sparton.retrieval.storing import FileDtype
from sparton.types import Kind, TextCollection
from sparton.writing import replacing, writing

HEADER = 512  # bytes kept for the description of the tensors, which is known last
DTYPES = {"float16": "F16", "float32": "F32"}

# Some consecutive texts, and what an encoder made of them.
Parts = Iterable[tuple[TextCollection, Representations]]


class Written(NamedTuple):
    """How many texts and entries (weights or token vectors) there are, and texts without any."""

    texts: int
    entries: int
    empty: int

    @classmethod
    def of_lengths(cls, lengths: Tensor) -> "Written":
        return cls(len(lengths), int(lengths.sum()), int((lengths == 0).sum()))


@dataclass(frozen=True)
class SparseFile:
    """One JSON object per line: ``id``, perhaps ``contents``, and ``vector``, which maps terms to
    weights. A weight has the fewest digits that give the same fp32 number.

    Attributes:
        path: ending in ``.jsonl``, or in ``.jsonl.gz`` for gzip.
        max_terms: keep this many of a text's largest weights; None for all.
        quantize: N to write ``round(N * weight)``, without zeros; None for the weights.
        contents: write the texts, too.
        overwrite: replace a file that exists.

    Raises:
        ArgumentError: names the argument that cannot be.
    """

    path: str | Path
    max_terms: int | None = None
    quantize: int | None = None
    contents: bool = False
    overwrite: bool = False

    kind: ClassVar[Kind] = "sparse"
    endings: ClassVar[tuple[str, ...]] = (".jsonl", ".jsonl.gz")

    def __post_init__(self) -> None:
        refuse_below(1, max_terms=self.max_terms, quantize=self.quantize)
        _check_place(self.path, self.endings, [Path(self.path)], self.overwrite)

    def write(self, parts: Parts, names: Sequence[str]) -> Written:
        """
        Args:
            parts: with sparse vectors.
            names: of the V terms, all different.
        """
        path, keys = Path(self.path), [json.dumps(name, ensure_ascii=False) for name in names]
        lengths = [torch.zeros(0, dtype=torch.int64)]
        with replacing(path) as fresh, writing(fresh, compress=path.suffix == ".gz") as sink:
            for texts, encoded in parts:
                vectors = encoded.sparse
                assert isinstance(vectors, SparseVectors)
                if self.quantize is not None:
                    vectors = quantized(vectors, self.quantize)
                for record, vector in zip(_records(texts, self.contents), _vectors(vectors, keys)):
                    sink.write(f'{record[:-1]}, "vector": {{{vector}}}}}\n'.encode())
                lengths.append(vectors.lengths)
        return Written.of_lengths(torch.cat(lengths))


@dataclass(frozen=True)
class TokenFile:
    """A safetensors file of ``vectors [T, E]`` and ``cu_seqlens [N + 1]``, int64: text n owns the
    rows ``cu_seqlens[n] : cu_seqlens[n + 1]``. Beside it ``ids_file`` has an id per line.

    Attributes:
        path: ending in ``.safetensors``.
        dtype: of the vectors.
        overwrite: replace files that exist.

    Raises:
        ArgumentError: names the argument that cannot be.
    """

    path: str | Path
    dtype: FileDtype = "float16"
    overwrite: bool = False

    kind: ClassVar[Kind] = "tokens"
    endings: ClassVar[tuple[str, ...]] = (".safetensors",)

    def __post_init__(self) -> None:
        refuse_other(DTYPES, dtype=self.dtype)
        written = [Path(self.path), self.ids_file]
        _check_place(self.path, self.endings, written, self.overwrite)

    @property
    def ids_file(self) -> Path:
        path = Path(self.path)
        return path.with_name(f"{path.name.removesuffix('.safetensors')}.ids")

    def write(self, parts: Parts, ids: Iterable[str], number: int) -> Written:
        """Only the lengths are kept in memory: the vectors follow the place of ``cu_seqlens``,
        which is filled in last.

        Args:
            parts: with token vectors, of at least one text.
            ids: of all texts, which are written before the first part is asked for.
            number: N.

        Raises:
            ValueError: an id that is not one line.
        """
        with replacing(Path(self.path)) as fresh, replacing(self.ids_file) as names:
            _write_ids(names, ids)
            with fresh.open("wb") as sink:
                sink.seek(8 + HEADER + 8 * (number + 1))
                lengths: list[Tensor] = []
                for _, encoded in parts:
                    assert encoded.tokens is not None
                    vectors = encoded.tokens
                    sink.write(vectors.values.contiguous().numpy().data)
                    lengths.append(vectors.lengths)
                cu_seqlens = cu_seqlens_of(torch.cat(lengths))
                sink.seek(0)
                sink.write(_header(vectors, cu_seqlens))
                sink.write(cu_seqlens.numpy().data)
        return Written.of_lengths(cu_seqlens.diff())


FORMATS: dict[Kind, type[SparseFile] | type[TokenFile]] = {
    "sparse": SparseFile,
    "tokens": TokenFile,
}


def format_of(path: str | Path, kind: Kind | None = None) -> type[SparseFile] | type[TokenFile]:
    """The format that the ending of a file is for.

    Args:
        path: of the file.
        kind: of vectors that it must be for; None for any.

    Raises:
        ArgumentError: an ending of another kind, or of none.
    """
    for each in FORMATS.values():
        if str(path).endswith(each.endings):
            if kind in (None, each.kind):
                return each
            raise ArgumentError(
                "{path} is for {}: with {kind} it must end in {}",
                KINDS[each.kind],
                " or ".join(FORMATS[kind].endings),
                path=str(path),
                kind=kind,
            )
    ways = (f"{' or '.join(each.endings)} for {KINDS[kind]}" for kind, each in FORMATS.items())
    raise ArgumentError("{path} must end in {}", ", ".join(ways), path=str(path))


def _check_place(
    path: str | Path, endings: tuple[str, ...], files: Sequence[Path], overwrite: bool
) -> None:
    if not str(path).endswith(endings):
        raise ArgumentError("{path} must end in {}", " or ".join(endings), path=str(path))
    for file in files:
        if file.is_dir():
            raise ArgumentError("{} is a folder: name another {path:name}", file, path=path)
        if file.exists() and not overwrite:
            raise ArgumentError(
                "{} exists: name another {path:name}, or replace it by {overwrite}",
                file,
                path=path,
                overwrite=True,
            )


def quantized(vectors: SparseVectors, factor: int) -> SparseVectors:
    """Whole numbers ``round(factor * weight)``, int64 and without zeros; halves become even."""
    values = (factor * vectors.values.double()).round().long()
    kept = values != 0
    owners = sequence_ids(vectors.cu_seqlens, vectors.num_entries)[kept]
    lengths = torch.bincount(owners, minlength=vectors.num_vectors)
    return SparseVectors(values[kept], vectors.terms[kept], cu_seqlens_of(lengths), vectors.width)


def _write_ids(file: Path, ids: Iterable[str]) -> None:
    with file.open("w", encoding="utf-8", newline="\n") as sink:
        for identifier in ids:
            if identifier.splitlines() != [identifier]:
                raise ValueError(
                    f"the id {identifier!r} is empty or holds a line break, and ids are written "
                    "one per line: rename it in the file of texts"
                )
            sink.write(f"{identifier}\n")


def _header(vectors: TokenVectors, cu_seqlens: Tensor) -> bytes:
    """The length of the description, and the description, filled up with spaces."""
    start, T = cu_seqlens.nbytes, int(cu_seqlens[-1])
    stop = start + T * vectors.width * vectors.values.element_size()
    dtype = str(vectors.values.dtype).removeprefix("torch.")
    tensors = {
        "__metadata__": {"format": "pt"},
        "cu_seqlens": {"dtype": "I64", "shape": [len(cu_seqlens)], "data_offsets": [0, start]},
        "vectors": {
            "dtype": DTYPES[dtype],
            "shape": [T, vectors.width],
            "data_offsets": [start, stop],
        },
    }
    return struct.pack("<Q", HEADER) + json.dumps(tensors).encode().ljust(HEADER)


def _records(texts: TextCollection, contents: bool) -> Iterator[str]:
    """JSON objects without vectors."""
    for identifier, text in zip(*texts, strict=True):
        record = {"id": identifier} | ({"contents": text} if contents else {})
        yield json.dumps(record, ensure_ascii=False)


def _vectors(vectors: SparseVectors, keys: Sequence[str]) -> Iterator[str]:
    """The inside of a JSON object for every vector."""
    values, terms = vectors.values.numpy(), vectors.terms.tolist()
    for first, last in pairwise(vectors.cu_seqlens.tolist()):
        weights = values[first:last].astype(str).tolist()
        yield ", ".join(f"{keys[term]}: {w}" for term, w in zip(terms[first:last], weights))
