"""Worker processes: what they send, and what is said when one of them dies."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from sparton.types import TrainBatch

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

SIGNAL_SECONDS = 1.0


class Batches:
    """The batches of a loader that gives parcels. They can be taken any number of times.

    A worker process that dies ends the program's main thread, wherever that is, with
    ChildProcessError: its batches would be missing.
    """

    def __init__(self, parcels: "DataLoader[Any]") -> None:
        self._parcels = parcels

    def __len__(self) -> int:
        return len(self._parcels)

    def __iter__(self) -> Iterator[TrainBatch]:
        parcels = iter(self._parcels)
        _explain_deaths()
        try:
            for parcel in parcels:
                yield parcel.batch()
        except RuntimeError as error:  # torch looks for the dead itself when it is interrupted
            if isinstance(error.__cause__, ChildProcessError):
                raise error.__cause__ from None
            if str(error).startswith("DataLoader worker "):  # amid the sending of a parcel
                raise _death(str(error)) from error
            raise
        except (ConnectionError, EOFError) as error:  # in the middle of the sending of a parcel
            time.sleep(SIGNAL_SECONDS)  # the signal is on its way, and says more
            raise _death("the connection to it is lost.") from error
        except (ValueError, OSError) as error:
            if not str(error).startswith("Caught "):  # by torch, in a worker
                raise
            raise type(error)(_without_traceback(error)) from error


def _without_traceback(error: Exception) -> str:
    """The words of an error of a worker, which torch hands on behind the worker's traceback."""
    return re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ", str(error))[-1].rstrip()


class _Explanation:
    """A handler of SIGCHLD around torch's, whose error only says which process it was."""

    def __init__(self, torchs: Callable[[int, FrameType | None], None]) -> None:
        self._torchs = torchs

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._torchs(number, frame)
        except RuntimeError as error:
            raise _death(str(error)) from error


def _death(fault: str) -> ChildProcessError:
    return ChildProcessError(
        f"a process that reads and tokenises ahead has died: {fault.strip()} The machine, or this "
        "container, may be out of memory (each of num_workers processes needs some) or of shared "
        "memory (/dev/shm; docker run --shm-size). The same command goes on from the last "
        "checkpoint"
    )


def _explain_deaths() -> None:
    """Once torch has set its handler, which it does when the first workers start."""
    handler = signal.getsignal(signal.SIGCHLD)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and callable(handler) and not isinstance(handler, _Explanation):
        signal.signal(signal.SIGCHLD, _Explanation(handler))


def prepare_worker(worker: int) -> None:
    """Call in each worker, before its first batch."""
    # Each of several would otherwise start as many threads as there are cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches every process of a terminal; the main one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
