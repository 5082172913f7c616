"""What indexes have made of encoded texts, kept beside them in ``indexes/NAME.safetensors``.

Such a file says of which texts it is. Where some were added or deleted since, it is made anew: an
index is never searched that is not of all texts that there are, and of no others.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparton.encoded.shards import KEY, arrays_digest
from sparton.reading import Fields
from sparton.retrieval.indexes.documents import Empty
from sparton.writing import failures_told, replacing

INDEXES = "indexes"
log = logging.getLogger(__name__)


def kept_arrays(
    folder: Path, digest: str, name: str, make: Callable[[Empty], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """Arrays that are made once for the texts of a folder, and from then on lie in a file.

    While they are made, the large ones lie in files, too, which take the place of memory. Where the
    folder cannot be written, they are made in memory each time, with a warning in the log.

    Args:
        folder: of encoded texts.
        digest: of these texts.
        name: of the file, without its ending.
        make: see :class:`~sparton.retrieval.indexes.documents.Keep`.

    Raises:
        ValueError: the file is damaged; names it.
        OSError: the disk is full.
    """
    path = folder / INDEXES / f"{name}.safetensors"
    found = _read(path, digest, verify=True)
    if found is not None:
        return found
    if not os.access(folder, os.W_OK):
        log.warning("%s is read-only: its index is built again each time", folder)
        return make(torch.empty)
    path.parent.mkdir(exist_ok=True)
    arrays = {each: array.contiguous() for each, array in make(partial(_room, path)).items()}
    told = {"documents": digest, "arrays": arrays_digest(arrays)}
    with replacing(path, shared=True) as fresh:
        save_file(arrays, fresh, {KEY: json.dumps(told)})
    for other in path.parent.glob("*.safetensors"):
        if _read(other, digest, verify=False) is None:
            other.unlink(missing_ok=True)
    return _read(path, digest, verify=False) or arrays


def _read(path: Path, digest: str, *, verify: bool) -> dict[str, Tensor] | None:
    """The arrays of a file, which lie there; None where it is of other texts, or there is none.

    Args:
        verify: whether to compare them with what was written, which reads all of the file.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            told = Fields.of(json.loads((file.metadata() or {}).get(KEY, "null")), str(path))
            if told.need("documents", str) != digest:
                return None
            arrays = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
        if verify and arrays_digest(arrays) != told.need("arrays", str):
            raise ValueError("it has another content than was written")
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete this file, and the index is built again"
        ) from error
    return arrays


def _room(path: Path, *size: int, dtype: torch.dtype) -> Tensor:
    """Room beside a file for an array, on the disk and without a name; see
    :class:`~sparton.retrieval.indexes.documents.Empty`."""
    number = torch.Size(size).numel()
    if not number:
        return torch.empty(size, dtype=dtype)
    with (
        failures_told(str(path), path),
        tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp") as file,
    ):
        # Without it, a disk that becomes full kills the process.
        os.posix_fallocate(file.fileno(), 0, number * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=number, dtype=dtype).view(size)
