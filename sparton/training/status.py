"""How a run stands: ``status.json`` of its folder, which sweeps and their reports go by."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

RUNNING, OK, OOM, FAILED, KILLED = "running", "ok", "oom", "failed", "killed"
RESULTS = (OK, OOM)  # with which a run is done; any other state is worth another try
_FILE, _ENDED, _LOCK = "status.json", ".ended", ".lock"
_GRACE = 15.0  # seconds
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class Status(NamedTuple):
    """``message`` says why a run did not end well."""

    state: str
    message: str = ""


def read_status(folder: Path) -> Status | None:
    """How the run in a folder stands; None where none has begun, or its file cannot be read."""
    try:
        return Status(**json.loads((folder / _FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """No other process writes a run into this folder meanwhile; where the file system has no locks,
    nothing is known of others.

    Raises:
        BlockingIOError: one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise BlockingIOError(f"{folder}: another process trains in this folder") from None
        except OSError:
            pass  # no locks here
        yield


def begin_run(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _ENDED).unlink(missing_ok=True)
    _write(folder, Status(RUNNING))


def end_run(folder: Path, status: Status) -> bool:
    """Write how a run ended, unless that is written already: of the processes of one run the first
    knows why, the others end because it did. Returns whether this was the first."""
    try:
        (folder / _ENDED).touch(exist_ok=False)
    except FileExistsError:
        return False
    _write(folder, status)
    return True


def failure_watch(folder: Path) -> Callable[[], bool]:
    """Says whether a process of a run has failed from now on, once all have had the time to end
    themselves: one that has not by then waits for something that will not come."""
    before = _stamp(folder)
    since: float | None = None

    def stop() -> bool:
        nonlocal since
        status = read_status(folder)
        if _stamp(folder) == before or status is None or status.state in (RUNNING, OK):
            since = None
            return False
        since = since or time.monotonic()
        return time.monotonic() - since > _GRACE

    return stop


def _stamp(folder: Path) -> tuple[int, int] | None:
    """What changes with every status that is written."""
    try:
        stat = (folder / _FILE).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _write(folder: Path, status: Status) -> None:
    staged = folder / f".{_FILE}.{os.getpid()}"
    staged.write_text(json.dumps(status._asdict()) + "\n")
    staged.replace(folder / _FILE)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device ran out of memory, directly or inside of what wraps errors."""
    return any(map(_is_out_of_memory, _chain(error)))


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY
    return isinstance(error, torch.OutOfMemoryError)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those behind it; torch.compile keeps the one behind as ``inner_exception``."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__, getattr(each, "inner_exception", None)]
