"""Dense embeddings of known texts on disk, verified where they are read.

R rows: those of the queries first, then those of the documents; D width.

A cache is a folder, written by ``sparton.pipelines.cache_embeddings``:

- ``embeddings.npy`` ``[R, D]``, fp32 or fp16;
- ``keys.npy`` uint64 ``[R]``, a hash of each row's text; a side has a text once;
- ``cache.json``, the :class:`CacheFacts`;
- ``progress.json``, the number of rows written and, when all are, the seals of both arrays;
- ``model``, the folder of the dense encoder that made them.
"""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_type_hints

import numpy as np
from numpy.typing import NDArray

from sparton.digests import Seal
from sparton.reading import Fields, read_json
from sparton.writing import replacing

EMBEDDINGS, KEYS, FACTS, PROGRESS, MODEL = (
    "embeddings.npy",
    "keys.npy",
    "cache.json",
    "progress.json",
    "model",
)
_AT_ONCE = 1 << 16  # rows
_MAKER = "sparton embed (in Python, sparton.pipelines.cache_embeddings)"
_DAMAGED = f"delete the folder and write it anew with {_MAKER}"


class CacheFacts(NamedTuple):
    """What the embeddings of a cache are.

    Attributes:
        queries: how many of the rows are those of queries.
        query_length, document_length: tokens at which texts were cut.
        pooling, normalized: how hidden states became embeddings, see
            :class:`~sparton.models.pooling.Pooling`.
        query_prompt, document_prompt: put before the texts.
        weights: digest of the encoder's weights.
        include_prompt: whether prompts were pooled.
    """

    queries: int
    query_length: int
    document_length: int
    pooling: Literal["mean", "cls", "last"]
    normalized: bool
    query_prompt: str
    document_prompt: str
    weights: str
    include_prompt: bool = True


class Cache(NamedTuple):
    """The files of a cache, of the right shapes; arrays are memory-mapped.

    Attributes:
        facts: what the embeddings are.
        keys: uint64 ``[R]``.
        embeddings: fp32 or fp16 ``[R, D]``.
        written: rows that have their embeddings, from the first on.
        seals: of both arrays, by file name; None before all rows are written.
    """

    facts: CacheFacts
    keys: NDArray[np.uint64]
    embeddings: NDArray
    written: int
    seals: dict[str, Seal] | None


def check_cache(folder: Path, *sealed: str) -> Cache:
    """A cache that can be used.

    Args:
        folder: of the cache.
        sealed: names of the arrays whose content is verified.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or not complete.
    """
    cache = open_cache(folder)
    if cache.seals is None:
        raise ValueError(
            f"{folder} holds {cache.written} of {len(cache.keys)} embeddings: the "
            f"same {_MAKER} goes on where it stopped"
        )
    for name in sealed:
        if fault := cache.seals[name].fault(folder / name):
            raise ValueError(f"the embeddings in {folder} are damaged ({fault}): {_DAMAGED}")
    return cache


def open_cache(folder: Path) -> Cache:
    """A cache, complete or not, whose files have the right shapes.

    Raises:
        FileNotFoundError: there is none.
        ValueError: names the file that is something else.
    """
    if not (folder / FACTS).is_file():
        raise FileNotFoundError(
            f"{folder} holds no cache of embeddings ({FACTS} is missing): write one with {_MAKER}"
        )
    facts = _facts(folder / FACTS)
    keys = _array(folder / KEYS, 1, "uint64")
    embeddings = _array(folder / EMBEDDINGS, 2, "float32", "float16")
    written, seals = _progress(folder / PROGRESS)
    if not len(embeddings) == len(keys) >= max(facts.queries, written):
        raise ValueError(
            f"{folder} does not fit together: {len(embeddings)} embeddings, {len(keys)} keys, "
            f"{facts.queries} queries, {written} rows written: {_DAMAGED}"
        )
    return Cache(facts, keys, embeddings, written, seals if written == len(keys) else None)


def note_progress(folder: Path, rows: int, seals: dict[str, Seal] | None = None) -> None:
    """Write how many rows have their embeddings."""
    stored = {"rows": rows, "files": {name: list(seal) for name, seal in (seals or {}).items()}}
    with replacing(folder / PROGRESS) as fresh:
        fresh.write_text(json.dumps(stored) + "\n")


def seal_cache(folder: Path) -> None:
    """Mark a cache as complete, from now on to be verified.

    Raises:
        ValueError: an embedding is not finite.
    """
    embeddings = open_cache(folder).embeddings
    for start in range(0, len(embeddings), _AT_ONCE):
        finite = np.isfinite(embeddings[start : start + _AT_ONCE]).all(axis=1)
        if not finite.all():
            raise ValueError(
                f"row {start + int(finite.argmin())} of {folder / EMBEDDINGS} is not finite: "
                f"{_DAMAGED}"
            )
    seals = {name: Seal.of(folder / name) for name in (EMBEDDINGS, KEYS)}
    note_progress(folder, len(embeddings), seals)


def _object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; ValueError names the file."""
    try:
        return Fields.of(read_json(path), str(path)).as_dict()
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{error}; {_DAMAGED}") from error


def _facts(path: Path) -> CacheFacts:
    stored = _object(path)
    kinds = get_type_hints(CacheFacts) | {"pooling": str}
    unlike = [
        name for name, kind in kinds.items() if type(stored.get(name)) is not kind
    ] + [name for name in stored if name not in kinds]  # fmt: skip
    if not unlike and stored["pooling"] not in ("mean", "cls", "last"):
        unlike.append("pooling")
    if not unlike:
        counts = (stored["queries"], stored["query_length"] - 1, stored["document_length"] - 1)
        unlike += ["queries and lengths"] if min(counts) < 0 else []
    if unlike:
        raise ValueError(f"{path} has other {', '.join(unlike)} than a cache has: {_DAMAGED}")
    return CacheFacts(**stored)


def _progress(path: Path) -> tuple[int, dict[str, Seal] | None]:
    stored = _object(path)
    rows, files = stored.get("rows"), stored.get("files", {})
    try:
        seals = {name: Seal(*seal) for name, seal in files.items()}
    except (AttributeError, TypeError):
        seals = {"": Seal(0, "")}
    if type(rows) is not int or rows < 0 or (seals and {*seals} != {EMBEDDINGS, KEYS}):
        raise ValueError(f"{path} does not say how many rows are written: {_DAMAGED}")
    return rows, seals or None


def _array(path: Path, dimensions: int, *dtypes: str) -> NDArray:
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError, OverflowError, MemoryError, SyntaxError) as error:
        raise ValueError(f"{path} cannot be read as an array ({error}): {_DAMAGED}") from error
    if not isinstance(found, np.ndarray):
        raise ValueError(f"{path} holds several arrays: {_DAMAGED}")
    if found.ndim != dimensions or found.dtype not in map(np.dtype, dtypes):
        raise ValueError(
            f"{path} holds {found.dtype} {list(found.shape)}, not {' or '.join(dtypes)} of "
            f"{dimensions} dimensions: {_DAMAGED}"
        )
    return cast(NDArray, found)
