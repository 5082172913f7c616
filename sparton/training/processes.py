"""Other processes of this program: one that is waited for, or several on one machine.

They do not outlive this one, however it ends. Ctrl-C reaches this one alone, which ends them.
"""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

log = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PATIENCE = 10  # seconds in which a process that was asked to end may do so


class Ended(NamedTuple):
    """How a group of processes ended: the first that failed, or 0 where none did."""

    code: int
    rank: int = 0

    def __str__(self) -> str:
        if self.code >= 0:
            return f"ended with exit status {self.code}"
        name = signal.Signals(-self.code).name
        memory = " (out of the machine's own memory, perhaps)" if name == "SIGKILL" else ""
        return f"was ended by {name}{memory}"


def run_alone(
    command: Sequence[str], stop: Callable[[], bool], environment: Mapping[str, str]
) -> Ended:
    """Start one process, with some variables beside this one's own, and wait until it ends, or
    until ``stop`` says that it must."""
    return _wait([_start(command, environment)], stop)


def run_ranks(
    command: Sequence[str],
    count: int,
    stop: Callable[[], bool],
    environment: Mapping[str, str],
) -> Ended:
    """Start ``count`` ranks of one process group on this machine, and wait for all of them. When
    one fails the others are ended, for they would wait for it; all are when ``stop`` says so."""
    group = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return _wait(_start_all(command, count, group), stop)


def run_workers(command: Sequence[str], count: int) -> Ended:
    """Start ``count`` processes on this machine that do without one another, and wait for all of
    them. The death of one by a signal is told, and left to the others; all are ended when one fails
    by itself, for what is wrong there is so for all."""
    workers = _start_all(command, count, {})
    return _wait(workers, lambda: False, go_on_without_killed=True)


def _start_all(
    command: Sequence[str], count: int, environment: Mapping[str, str]
) -> list[subprocess.Popen]:
    """``count`` processes that know their number and share the cores."""
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // count)))
    shared = {
        **environment,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": threads,
    }
    return [
        _start(command, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command, env={**os.environ, **environment}, process_group=0, preexec_fn=_end_with_parent
    )


def _wait(
    processes: Sequence[subprocess.Popen],
    stop: Callable[[], bool],
    *,
    go_on_without_killed: bool = False,
) -> Ended:
    """Until all have ended well, one has not, or they are to stop; nothing is left running."""
    dead = set()
    try:
        while True:
            codes = [process.poll() for process in processes]
            over = None not in codes
            for rank, code in enumerate(codes):
                if code and (over or code > 0 or not go_on_without_killed):
                    return Ended(code, rank)
                if code and rank not in dead:
                    dead.add(rank)
                    log.warning("worker %d %s: the others go on", rank, Ended(code, rank))
            if over:
                return Ended(0)
            if stop():
                return Ended(-signal.SIGTERM)
            time.sleep(0.1)
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
