"""Files of representations, each of some consecutive texts, written whole and read in place.

n texts, P active entries, T tokens, V terms, E width of a token's vector, D of a text's.

A file in the format of safetensors has of sparse vectors ``indptr`` int64 ``[n + 1]``, ``indices``
int32 ``[P]`` and ``values`` fp32 ``[P]``; of token vectors ``boundaries`` int64 ``[n + 1]``,
``vectors`` ``[T, E]`` in the dtype of the folder and, in FP8, ``scales`` fp32 ``[T]``; of dense
vectors ``dense`` ``[n, D]`` in that dtype and, in FP8, ``dense_scales`` fp32 ``[n]``. Its metadata
say which texts these are, and have a digest of the arrays.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparton.encoded.facts import SHARDS, Settings, Shard
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.reading import Fields
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.storing import VectorDtype
from sparton.writing import replacing

KEY = "sparton"  # one alone: safetensors writes several in any order
_AT_ONCE = 1 << 24  # bytes
_DTYPES: dict[VectorDtype, str] = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"
}  # fmt: skip


class Stored(NamedTuple):
    """What a file of a shard holds, as its head says; nothing else was read.

    Attributes:
        path: of the file.
        entries: P, active entries; 0 without sparse vectors.
        tokens: T; 0 without token vectors.
        nbytes: of the file.
        digest: of the arrays.
    """

    path: Path
    entries: int
    tokens: int
    nbytes: int
    digest: str


def shard_path(folder: Path, shard: Shard) -> Path:
    """The file of a shard, which is there if and only if it is complete."""
    return folder / SHARDS / shard.name


def write_shard(folder: Path, shard: Shard, encoded: Representations) -> None:
    """Write the representations of the texts of a shard; whoever does so writes the same bytes.

    Raises:
        OSError: the disk is full or not writable.
    """
    tensors: dict[str, Tensor] = {}
    sparse, tokens = encoded.sparse, encoded.tokens
    if isinstance(sparse, SparseVectors):
        tensors |= {"indptr": sparse.cu_seqlens, "indices": sparse.terms, "values": sparse.values}
    if tokens is not None:
        tensors |= {"boundaries": tokens.cu_seqlens, "vectors": tokens.values}
        tensors |= {} if tokens.scales is None else {"scales": tokens.scales}
    if encoded.dense is not None:
        tensors["dense"], scales = encoded.dense.values, encoded.dense.scales
        tensors |= {} if scales is None else {"dense_scales": scales}
    told = {
        "rows": [shard.rows.start, shard.rows.stop],
        "content": shard.content,
        "arrays": arrays_digest(tensors),
    }
    path = shard_path(folder, shard)
    try:
        with replacing(path, shared=True) as fresh:
            save_file(tensors, fresh, {KEY: json.dumps(told)})
    except OSError:
        if not path.is_file():  # else another has written it meanwhile, and swept up
            raise


def inspect_shard(folder: Path, shard: Shard, settings: Settings) -> Stored:
    """What the file of a shard holds, of the right texts and with the right arrays; their content
    is not read.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is truncated, damaged or of something else; names the file.
    """
    path, number = shard_path(folder, shard), len(shard.rows)
    entries = tokens = 0
    path.open("rb").close()  # safetensors says of every file that it cannot open that there is none
    try:
        with safe_open(path, "pt") as file:
            told = Fields.of(json.loads((file.metadata() or {}).get(KEY, "null")), str(path))
            shapes = {name: _shape(file, name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    expected: dict[str, tuple] = {}
    if "sparse" in settings.kinds:
        entries = shapes.get("indices", (None, 0))[1]
        expected |= {
            "indptr": ("I64", number + 1), "indices": ("I32", entries), "values": ("F32", entries)
        }  # fmt: skip
    dtype, scaled = _DTYPES[settings.vector_dtype], settings.vector_dtype == "float8_e4m3fn"
    if "tokens" in settings.kinds:
        tokens = shapes.get("vectors", (None, 0))[1]
        expected |= {
            "boundaries": ("I64", number + 1), "vectors": (dtype, tokens, settings.token_width)
        }  # fmt: skip
        expected |= {"scales": ("F32", tokens)} if scaled else {}
    if "dense" in settings.kinds:
        expected["dense"] = dtype, number, settings.dense_width
        expected |= {"dense_scales": ("F32", number)} if scaled else {}
    rows = told.get("rows", list)
    if told.get("content", str) != shard.content or rows != [shard.rows.start, shard.rows.stop]:
        raise ValueError(
            f"{path} holds other texts, or by another model or settings, than rows "
            f"{shard.rows.start} to {shard.rows.stop} of this folder: delete it and encode again, "
            "which writes it anew"
        )
    if shapes != expected:
        raise _damaged(path, f"it has the arrays {shapes} in the place of {expected}")
    return Stored(path, entries, tokens, path.stat().st_size, told.need("arrays", str))


def map_shard(stored: Stored, settings: Settings, *, verify: bool) -> Representations:
    """The representations of a shard, which lie in the file and not in memory until they are read.

    Args:
        verify: whether to compare the content of the arrays with their digest first, which reads
            all of the file.

    Raises:
        ValueError: the content is not what was written; names the file.
    """
    with safe_open(stored.path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if verify and arrays_digest(tensors) != stored.digest:
        raise _damaged(stored.path, "it has another content than was written")
    sparse = tokens = dense = None
    if "indptr" in tensors:
        arrays = tensors["values"], tensors["indices"], tensors["indptr"]
        sparse = SparseVectors(*arrays, settings.sparse_width)
    if "vectors" in tensors:
        vectors, bounds = tensors["vectors"], tensors["boundaries"]
        tokens = TokenVectors(vectors, bounds, scales=tensors.get("scales"))
    if "dense" in tensors:
        vectors, scales = tensors["dense"], tensors.get("dense_scales")
        dense = TokenVectors(vectors, torch.arange(len(vectors) + 1), scales=scales)
    return Representations(sparse, tokens, dense)


def _shape(file: "safe_open", name: str) -> tuple:
    """Dtype and sizes of an array."""
    array = file.get_slice(name)
    return array.get_dtype(), *array.get_shape()


def arrays_digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest of the names and bytes of arrays."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(
        f"{path} is damaged ({why}): delete it and encode again, which writes it anew"
    )
