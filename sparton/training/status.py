"""How a run stands: ``status.json`` of its folder, which sweeps and their reports go by, and who
may write there.

A folder has one owner at a time, the process that holds its lock. The processes that the owner
starts are members of its run: they know its name, by which they tell the end of this run and of no
other.
"""

import fcntl
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import torch

from sparton.reading import read_json
from sparton.writing import replacing, sweep_leftovers

RUNNING, OK, OOM, FAILED, KILLED = "running", "ok", "oom", "failed", "killed"
RESULTS = (OK, OOM)  # with which a run is done; any other state is worth another try
RUN = "SPARTON_RUN"  # the environment variable that names the run whose owner started a process
_FILE, _LOCK = "status.json", ".lock"
_OWNER, _MEMBERS = 0, 1  # bytes of the lock
_GRACE = 15.0  # seconds
_LONGEST = 3000  # characters of a message, so that a status stays within its block of the disk
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
log = logging.getLogger(__name__)


class Status(NamedTuple):
    """``message`` says why a run did not end well."""

    state: str
    message: str = ""


def read_status(folder: Path) -> Status | None:
    """How the run in a folder stands; None where none has begun, or its file cannot be read."""
    return _read(folder)[1]


def run_name() -> str:
    """The name of the run that this process is part of: what its owner says, what ranks share that
    others have started, or a new one."""
    if given := os.environ.get(RUN):
        return given
    if "RANK" in os.environ and "MASTER_PORT" in os.environ:
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ['MASTER_PORT']}"
    return uuid.uuid4().hex


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """This process owns a folder, or is a member of its owner's run; where the file system has no
    locks, nothing is known of others. An owner sweeps what dead ones have left.

    Raises:
        BlockingIOError: another run is there, or a process of one whose owner was killed.
    """
    member = RUN in os.environ or os.environ.get("RANK", "0") != "0"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a+") as lock:
        try:
            # Ranks that torchrun has started come before their owner or after: they take no lock.
            if RUN in os.environ:
                fcntl.lockf(lock, fcntl.LOCK_SH, 1, _MEMBERS)
            elif not member:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OWNER)
                _wait_for_members(lock)
        except (BlockingIOError, PermissionError):
            raise BlockingIOError(f"{folder}: another process works in this folder") from None
        except OSError:
            pass  # no locks here
        if not member:
            sweep_leftovers(folder)
            sweep_leftovers(folder / "checkpoints")
        yield


def _wait_for_members(lock: IO[str]) -> None:
    """Wait until the processes of an owner that was killed have ended, as they do by themselves."""
    deadline = time.monotonic() + _GRACE
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _MEMBERS)
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            fcntl.lockf(lock, fcntl.LOCK_UN, 1, _MEMBERS)
            return


def begin_run(folder: Path, run: str) -> None:
    """Say that a run of this name has begun.

    Raises:
        OSError: the disk is full or not writable.
    """
    _write(folder, run, Status(RUNNING))


def end_run(folder: Path, run: str, status: Status) -> bool:
    """Write how a run ended, unless that is written already: of the processes of one run the first
    knows why, the others end because it did. What another run has written stays.

    That it cannot be written is no error: why the run ended is more than that.

    Returns:
        Whether this was the first.
    """
    with _one_at_a_time(folder):
        name, before = _read(folder)
        if before is not None and (name != run or before.state != RUNNING):
            return False
        try:
            _write(folder, run, status)
        except OSError as error:
            log.warning("%s does not say how this run ended: %s", folder / _FILE, error)
    return True


def failure_watch(folder: Path, run: str) -> Callable[[], bool]:
    """Says whether a process of a run has failed from now on, once all have had the time to end
    themselves: one that has not by then waits for something that will not come."""
    before = _stamp(folder)
    since: float | None = None

    def stop() -> bool:
        nonlocal since
        name, status = _read(folder)
        over = status is not None and name == run and status.state not in (RUNNING, OK)
        if _stamp(folder) == before or not over:
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


def _read(folder: Path) -> tuple[str, Status | None]:
    """The name of the run that is in a folder, and how it stands."""
    try:
        content = read_json(folder / _FILE)
        texts = [content.pop("run", ""), *Status(**content)]
    except (OSError, ValueError, TypeError, AttributeError):
        return "", None
    if not all(isinstance(text, str) for text in texts):
        return "", None
    return texts[0], Status(*texts[1:])


def _write(folder: Path, run: str, status: Status) -> None:
    """A disk that is full takes no new file, but a few bytes in the place of others."""
    path = folder / _FILE
    content = {"state": status.state, "message": status.message[:_LONGEST], "run": run}
    text = json.dumps(content) + "\n"
    try:
        with replacing(path) as fresh:
            fresh.write_text(text)
    except OSError as error:
        try:
            with path.open("r+") as file:
                file.write(text)
                file.truncate()
        except OSError:
            raise error from None


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Processes of one run take turns, unless the folder is gone, the file system has no locks or
    one does not let go: a signal may have come to this very process in its turn."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    for _ in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            break
    try:
        yield
    finally:
        os.close(descriptor)


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
