"""Other processes of this program: one that is waited for, or the ranks of one machine.

They do not outlive this one, however it ends. Ctrl-C reaches this one alone, which ends them.
"""

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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
    shared = {
        **environment,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count))
        ),
    }
    ranks = [
        _start(command, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    return _wait(ranks, stop)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command, env={**os.environ, **environment}, process_group=0, preexec_fn=_end_with_parent
    )


def _wait(processes: Sequence[subprocess.Popen], stop: Callable[[], bool]) -> Ended:
    """Until all have ended well, one has not, or they are to stop; nothing is left running."""
    try:
        while True:
            codes = [process.poll() for process in processes]
            for rank, code in enumerate(codes):
                if code:
                    return Ended(code, rank)
            if None not in codes:
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
