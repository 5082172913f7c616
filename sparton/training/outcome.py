"""Runs whose end is written down: in this process, or in one for each GPU of this machine."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from sparton.errors import DeviceMemoryError, OtherRunError, RunError
from sparton.training.processes import run_ranks
from sparton.training.status import (
    FAILED,
    KILLED,
    OK,
    OOM,
    RUN,
    Status,
    begin_run,
    end_run,
    failure_watch,
    is_out_of_memory,
    read_status,
    run_name,
)

Result = TypeVar("Result")
log = logging.getLogger(__name__)
GOES_ON = "the same command goes on from the last checkpoint, or begins anew where there is none"

# When a process dies, the collectives of the others fail. Whoever started them ends them within
# this many seconds; an error that is still there afterwards is their own.
ECHO = 5.0


def run_here(
    work: Callable[[], Result],
    folder: Path,
    expected: tuple[type[Exception], ...],
    explain: Callable[[Exception], str] = str,
) -> Result:
    """Do ``work``, alone or as one of several ranks, and leave in ``folder`` how that ended; of a
    run that has ended well, this stays where it is told apart from what is asked for now.

    The process ends here, without a word, where another rank has told why.

    Args:
        expected: errors that a user can mend. An error of another type may be the echo of one on
            another rank.
        explain: the message that is left of an error.

    Raises:
        DeviceMemoryError: a device has no more memory.
        Exception: what ``work`` raises.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    run, before = run_name(), read_status(folder)
    if rank == 0:
        begin_run(folder, run)
    # The ranks of torchrun have no owner of this program that could say why they ended.
    alone = size == 1 or dist.is_torchelastic_launched()
    with termination_noted(folder, run) if alone else nullcontext():
        try:
            result = work()
        except Exception as error:
            lacks_memory = is_out_of_memory(error)
            told = DeviceMemoryError(str(error)) if lacks_memory else error
            if size > 1 and not isinstance(told, (DeviceMemoryError, *expected)):
                time.sleep(ECHO)
            if dist.is_torchelastic_launched():
                get_error_handler().record_exception(error)  # for torchrun's own report
            status = Status(OOM if lacks_memory else FAILED, explain(told))
            if isinstance(error, OtherRunError) and before == Status(OK):
                status = before  # its settings are others, and it is as it was
            if not end_run(folder, run, status) and size > 1:
                sys.exit(1)
            if told is error:
                raise
            raise told from error
    if rank == 0:
        end_run(folder, run, Status(OK))
    return result


@contextmanager
def termination_noted(folder: Path, run: str) -> Iterator[None]:
    """A signal that ends this process, as of a user, a terminal that is closed, a cluster or a
    container, is written down before it does; one that is ignored (nohup) stays ignored."""

    def note(message: str) -> None:
        if end_run(folder, run, Status(KILLED, message)) and dist.is_torchelastic_launched():
            log.error("%s; %s", message, GOES_ON)

    with _terminations(note):
        yield


@contextmanager
def termination_told(what_then: str) -> Iterator[None]:
    """A rank that torchrun ends says so in the log, as torchrun itself tells of signals alone.

    Args:
        what_then: becomes of the work.
    """
    told = False

    def note(message: str) -> None:  # from a thread and from the main one
        nonlocal told
        if not told:
            told = True
            log.error("%s; %s", message, what_then)

    with _terminations(note) if dist.is_torchelastic_launched() else nullcontext():
        yield


@contextmanager
def _terminations(note_end: Callable[[str], None]) -> Iterator[None]:
    """Before a signal ends this process, ``note_end`` is called with what is to be said of it."""
    process = os.getpid()  # not one that it starts, which may inherit the handler
    elastic = dist.is_torchelastic_launched()

    def note(number: int) -> None:
        message = f"ended by {signal.Signals(number).name}"
        if elastic and number == signal.SIGTERM:
            message += ", which torchrun sends when it or another rank is ended"
        if os.getpid() == process:
            note_end(message)

    def end(number: int, _: FrameType | None) -> None:
        note(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    noted = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                noted[number] = signal.signal(number, end)
    try:
        with _heard(noted, note) if elastic and noted else nullcontext():
            yield
    except KeyboardInterrupt:
        note(signal.SIGINT)
        raise
    finally:
        for number, before in noted.items():
            signal.signal(number, before)


@contextmanager
def _heard(numbers: Collection[int], note: Callable[[int], None]) -> Iterator[None]:
    """Note signals in a thread. The main one, where handlers run, may wait on its GPU for a rank
    that is gone, until torchrun kills it."""
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)

    def listen() -> None:
        while number := os.read(receiver, 1)[0]:
            if number in numbers:
                note(number)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(sender, b"\0")  # workers that were forked hold the pipe open
        listener.join()
        os.close(sender)
        os.close(receiver)


def run_on_gpus(command: Sequence[str], gpus: int, folder: Path) -> None:
    """Run ``command``, which calls :func:`run_here`, once for each GPU.

    Raises:
        RunError: a process failed; the others ended with it.
    """
    run = run_name()
    begin_run(folder, run)
    with termination_noted(folder, run):
        ended = run_ranks(command, gpus, failure_watch(folder, run), {RUN: run})
    if ended.code == 0:
        return
    message = f"rank {ended.rank} {ended}"
    if not end_run(folder, run, Status(KILLED if ended.code < 0 else FAILED, message)):
        status = read_status(folder)
        raise RunError(status.message if status else message, told=True)
    raise RunError(
        f"{message}, and the others with it; {GOES_ON}",
        told=False,
    )
