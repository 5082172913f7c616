"""Winners of searches for the fastest configuration, in one JSON file of the user's cache.

A winner belongs to a regime: kernel, GPU, Triton, sources, dtype, and three sizes in powers of 2.
The number of sequences and the mix of their lengths are not part of it, so that no batch asks for
another search.
"""

import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
import triton

log = logging.getLogger(__name__)


class Regime(NamedTuple):
    """What a winner belongs to.

    Attributes:
        kernel: which kernels are configured.
        gpu, triton: name of the device, version of the compiler.
        sources: digest of the sources of all kernels; a winner of other sources counts no more.
        dtype, width: of the operands, hidden units or units of an embedding.
        rows: of the vocabulary, or query tokens, rounded up to a power of 2.
        mean_length: tokens per sequence, rounded to a power of 2.
    """

    kernel: str
    gpu: str
    triton: str
    sources: str
    dtype: str
    width: int
    rows: int
    mean_length: int


class Winner(NamedTuple):
    """A configuration, by the name of its class, and its settings."""

    kind: str
    settings: dict[str, Any]


@functools.cache
def _source_digest() -> str:
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def regime_of(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    rows: int,
    mean_length: float,
) -> Regime:
    """The regime of rows ``[rows, width]`` and of sequences of that mean length."""
    return Regime(
        kernel,
        _device_name(device),
        triton.__version__,
        _source_digest(),
        str(dtype).removeprefix("torch."),
        width,
        1 << max(rows - 1, 0).bit_length(),
        1 << round(math.log2(max(mean_length, 1.0))),
    )


@functools.cache
def tuned_configs() -> dict[Regime, Any]:
    """Winners of searches (see tuning.py) that replace default configurations: those of this
    process and, if the environment has SPARTON_TUNED=1, those of earlier ones; what :func:`tuned`
    has made of them, once it was asked. Who launches looks whether there are any before a regime is
    made."""
    return read_winners() if os.environ.get("SPARTON_TUNED") == "1" else {}


def use_tuned_configs() -> None:
    """Launch with the winners of earlier searches from now on; SPARTON_TUNED=1 does the same."""
    tuned_configs().update(read_winners())


def tuned(kinds: tuple[type[Any], ...], regime: Regime) -> Any | None:
    """The winner of a regime, made by one of the classes ``kinds``; None where there is none. One
    whose settings are not those of its class counts as none, with a warning that names the file."""
    winners = tuned_configs()
    found = winners.get(regime)
    if isinstance(found, Winner):  # not asked for before
        kind = next((kind for kind in kinds if kind.__name__ == found.kind), None)
        if kind is None:
            return None
        found = winners[regime] = _made(kind, found.settings)
    return found if isinstance(found, kinds) else None


def _made(kind: type[Any], settings: dict[str, Any]) -> Any | None:
    try:
        config = kind(**settings)
        for (name, expected), value in zip(get_type_hints(kind).items(), config, strict=True):
            if not isinstance(value, expected):
                raise TypeError(f"{name} is {value!r}")
    except TypeError as error:
        _warn(cache_file(), f"the settings of a record are no {kind.__name__} ({error})")
        return None
    return config


def cache_file() -> Path:
    """``$XDG_CACHE_HOME/sparton/tuned.json``, under ``~/.cache`` by default."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "sparton" / "tuned.json"


def read_winners() -> dict[Regime, Winner]:
    """Every winner in the file.

    What cannot be understood, a record or all of the file, counts as none, with a warning that
    names the file; no file is nothing to warn of.
    """
    found = {}
    for record in _records(cache_file()):
        try:
            regime = Regime(**record["regime"])
            found[regime] = Winner(record["kind"], dict(record["settings"]))
        except (KeyError, TypeError, ValueError) as error:
            _warn(cache_file(), f"a record is not that of a winner ({error!r})")
    return found


def write_winner(regime: Regime, config: NamedTuple, milliseconds: float) -> Path:
    """Use a winner from now on, and put it into the file in place of the regime's earlier one, and
    of what cannot be understood; the file is whole at any moment, and searches may write to it at
    the same time. Returns its path."""
    winner = Winner(type(config).__name__, config._asdict())
    record = {"regime": regime._asdict(), **winner._asdict(), "milliseconds": milliseconds}
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent):
        others = [
            other
            for other in _records(path)
            if isinstance(other, dict) and other.get("regime") != regime._asdict()
        ]
        descriptor, fresh = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"winners": [*others, record]}, file, indent=1)
            Path(fresh).replace(path)
        except BaseException:
            Path(fresh).unlink(missing_ok=True)
            raise
    tuned_configs()[regime] = winner
    return path


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Within, no other process or thread is in here with the same folder; where the file system
    has no locks, nothing is known of others."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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
        "tuned configurations in %s are ignored: %s; remove the file and search again",
        path,
        reason,
    )
