"""Winners of searches for the fastest configuration, in one JSON file of the user's cache.

A winner belongs to a regime: GPU, Triton, source of the kernels, dtype, hidden size, vocabulary and
mean length of a sequence, the last two in powers of 2. The number of sequences and the mix of their
lengths are not part of it, so that no batch asks for another search.
"""

import functools
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

log = logging.getLogger(__name__)


class Regime(NamedTuple):
    """What a winner belongs to.

    Attributes:
        gpu, triton: name of the device, version of the compiler.
        kernel: digest of the sources of the core; a winner of other sources counts no more.
        dtype, hidden_size: of the operands.
        vocabulary: V, rounded up to a power of 2.
        mean_length: tokens per sequence, rounded to a power of 2.
    """

    gpu: str
    triton: str
    kernel: str
    dtype: str
    hidden_size: int
    vocabulary: int
    mean_length: int


@functools.cache
def _kernel_digest() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def regime_of(
    device: torch.device,
    dtype: torch.dtype,
    hidden_size: int,
    vocabulary: int,
    mean_length: float,
) -> Regime:
    """The regime of operands ``[T, D]`` and ``[V, D]`` with ``T / N = mean_length``."""
    return Regime(
        _device_name(device),
        triton.__version__,
        _kernel_digest(),
        str(dtype).removeprefix("torch."),
        hidden_size,
        1 << (vocabulary - 1).bit_length(),
        1 << round(math.log2(max(mean_length, 1.0))),
    )


def cache_file() -> Path:
    """``$XDG_CACHE_HOME/sparton/segment_max.json``, under ``~/.cache`` by default."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "sparton" / "segment_max.json"


def read_winners(kinds: Sequence[type[Any]]) -> dict[Regime, Any]:
    """Every winner in the file whose configuration is one of these classes.

    A file that cannot be understood is left as it is and counts as empty, with a warning that names
    it; no file is nothing to warn of.
    """
    classes = {kind.__name__: kind for kind in kinds}
    try:
        return {
            Regime(**record["regime"]): classes[record["kind"]](**record["settings"])
            for record in _records(cache_file())
            if record["kind"] in classes
        }
    except (KeyError, TypeError) as error:
        _warn(cache_file(), f"a record is not that of a winner ({error!r})")
        return {}


def write_winner(regime: Regime, config: NamedTuple, milliseconds: float) -> Path:
    """Put a winner into the file, in place of the regime's earlier one; the file is whole at any
    moment. Returns its path."""
    path = cache_file()
    others = [
        record
        for record in _records(path)
        if isinstance(record, dict) and record.get("regime") != regime._asdict()
    ]
    record = {
        "regime": regime._asdict(),
        "kind": type(config).__name__,
        "settings": config._asdict(),
        "milliseconds": milliseconds,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, fresh = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"winners": [*others, record]}, file, indent=1)
        Path(fresh).replace(path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise
    return path


def _records(path: Path) -> list[Any]:
    try:
        records = json.loads(path.read_text(encoding="utf-8"))["winners"]
        if isinstance(records, list):
            return records
        _warn(path, "its winners are not a list")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        _warn(path, repr(error))
    return []


def _warn(path: Path, reason: str) -> None:
    log.warning(
        "tuned configurations in %s are ignored: %s; remove the file and run "
        "scripts/tune_head.py again",
        path,
        reason,
    )
