"""Runs whose end is written down: in this process, or in one for each GPU of this machine."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from sparton.training.processes import run_ranks
from sparton.training.status import (
    FAILED,
    KILLED,
    OK,
    OOM,
    Status,
    begin_run,
    describe_failure,
    end_run,
    failure_watch,
)

# When a process dies, the collectives of the others fail. Whoever started them ends them within
# this many seconds; an error that is still there afterwards is their own.
_ECHO = 5.0


def run_here(
    work: Callable[[], None],
    folder: Path,
    expected: tuple[type[Exception], ...],
    explain: Callable[[Exception], str] = str,
) -> str | None:
    """Do ``work``, alone or as one of several ranks, and leave in ``folder`` how that ended.

    Args:
        expected: errors that a user can mend, like a lack of memory; others are raised, and so are
            these where the environment variable HYDRA_FULL_ERROR is 1.

    Returns:
        What to tell the user, None where all went well. The process ends here, without a word,
        where another rank has told why.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank == 0:
        begin_run(folder)
    try:
        with _termination_noted(folder) if size == 1 else nullcontext():
            work()
    except Exception as error:
        status = describe_failure(error, explain(error))
        known = isinstance(error, expected) or status.state == OOM
        if size > 1 and not known:
            time.sleep(_ECHO)
        if dist.is_torchelastic_launched():
            get_error_handler().record_exception(error)  # for torchrun's own report
        if not end_run(folder, status):
            sys.exit(1)
        if not known or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        return f"rank {rank}: {status.message}" if size > 1 else status.message
    if rank == 0:
        end_run(folder, Status(OK))
    return None


@contextmanager
def _termination_noted(folder: Path) -> Iterator[None]:
    """A SIGTERM, as of a cluster or a container, is written down before it ends this process."""
    process = os.getpid()  # not one that it starts, which may inherit the handler

    def end(number: int, _: FrameType | None) -> None:
        if os.getpid() == process:
            end_run(folder, Status(KILLED, "ended by SIGTERM"))
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_on_gpus(command: Sequence[str], gpus: int, folder: Path) -> str | None:
    """Run ``command``, which calls :func:`run_here`, once for each GPU.

    Returns:
        What to tell the user, None where all went well. The process ends here, without a word,
        where a rank has told why.
    """
    begin_run(folder)
    with _termination_noted(folder):
        ended = run_ranks(command, gpus, failure_watch(folder))
    if ended.code == 0:
        return None
    message = f"rank {ended.rank} {ended}"
    if not end_run(folder, Status(KILLED if ended.code < 0 else FAILED, message)):
        sys.exit(1)
    return f"{message}, and the others with it; the same command goes on from the last checkpoint"
