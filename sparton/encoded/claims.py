"""Who does what, among processes that share a folder and nothing else.

A process claims a piece of work by making a file, which only one can. It touches the file from time
to time, so that others see that it lives; the work of one that has died is taken over. That two do
the same in the end, as where one was suspended, must do no harm.
"""

import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HEARTBEAT = 10.0  # seconds between two touches
PATIENCE = 60.0  # seconds without one, after which a process counts as dead


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether the work that a file stands for is this process's own, for the length of the block.

    Raises:
        OSError: the folder is not writable.
    """
    descriptor = None
    while descriptor is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileNotFoundError:  # another process that is done has just removed the folder
            continue
        except FileExistsError:
            yield False
            return
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{socket.gethostname()} {os.getpid()}")
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(path, over), daemon=True)
    beating.start()
    try:
        yield True
    finally:
        over.set()
        beating.join()
        with suppress(OSError):
            path.unlink()


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """One process at a time changes what a folder says of itself, and the others wait; where the
    file system has no locks, nothing is known of others.

    Raises:
        OSError: there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # no locks here
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Watch:
    """What one process knows of the claims of others. No clocks are compared: a claim is dead when
    its file has not changed for long enough on this process's own."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, float]] = {}  # last change, and when it was noticed

    def drop_dead(self, path: Path) -> None:
        """Take a claim away from a process that has died."""
        try:
            changed, owner = path.stat().st_mtime_ns, path.read_text()
        except OSError:
            return  # it has ended meanwhile
        now = time.monotonic()
        last, since = self._seen.get(path, (None, now))
        if last != changed:
            self._seen[path] = changed, now
            since = now
        if now - since > PATIENCE or _is_gone(owner):
            with suppress(OSError):
                path.unlink()


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(HEARTBEAT):
        with suppress(OSError):  # another has taken it
            os.utime(path)


def _is_gone(owner: str) -> bool:
    """Whether a process of this machine has ended; of another's nothing is known."""
    host, _, process = owner.rpartition(" ")
    if host != socket.gethostname() or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
