"""Texts on their way to an encoder become tokens ahead of it: in a thread, or in processes where
there are many.

N texts, T tokens.
"""

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import current_process, get_context
from traceback import format_exc
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.packing import ranges_of
from sparton.retrieval.batches import ahead
from sparton.types import TokenBatch, TokenRows

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_DEVICES = {"cuda"}  # which are faster than a thread that tokenises
# A process takes milliseconds to start: of fewer texts, or on fewer cores, a thread is as fast.
_FEWEST_TEXTS, _FEWEST_CORES = 2**13, 4
_MOST = 16  # processes
_PIECE = 2**17  # characters that a process is given at once
_PIECES = 3  # of every process that are on their way
_LOOK = 1.0  # seconds between two looks whether a process lives

# Forked, a process has the tokenizer at once, whatever that is, and needs no program that can be
# imported. It calls nothing of CUDA and runs no threads, as workers of a DataLoader do not.
_FORK = get_context("fork")

Tokenize = Callable[[Sequence[str]], TokenBatch]


def usual_processes(device: torch.device, num_texts: int) -> int:
    """How many processes tokenise so many texts for an encoder on a device; 0 for a thread.

    Processes that were started to work side by side on this machine share its cores.
    """
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    few = num_texts < _FEWEST_TEXTS or cores < _FEWEST_CORES
    if few or device.type not in _DEVICES or current_process().daemon:  # which may start none
        return 0
    return min(cores - 1, _MOST)  # one is for what launches


@contextmanager
def tokenized(
    tokenize: Tokenize, groups: Iterator[Sequence[str]], processes: int
) -> Iterator[Iterator[TokenBatch]]:
    """The tokens of groups of texts, in order, computed while the caller uses those before. At the
    end of the block nothing of it runs any more, and no process is left.

    A thread takes from ``groups``, a few groups ahead. Without processes it tokenises them, too.
    It has to share the interpreter's lock with the caller, and lists of Python's integers are most
    of its work: processes have neither.

    Args:
        tokenize: tokens of each text by itself, whichever others it comes with.
        groups: of at least one text each.
        processes: how many; 0 for none. Tokens are the same.

    Raises:
        ChildProcessError: one of the processes has died. What ``tokenize`` raises in one is raised
            here, with a note of where that was.
    """
    if not processes:
        with ahead(map(tokenize, groups)) as coming:
            yield coming
        return
    started: list[_Process] = []
    sent = _send(tokenize, groups, processes, started)
    try:
        with ahead(sent, _PIECES * processes) as coming:
            try:
                yield _receive(coming)
            finally:  # the thread may be waiting for one of them
                _kill(started)
    finally:  # and may have started another meanwhile
        _kill(started)
        for process in started:
            process.join()


def _send(
    tokenize: Tokenize,
    groups: Iterator[Sequence[str]],
    processes: int,
    started: "list[_Process]",
) -> "Iterator[tuple[_Process, bool]]":
    """Give the processes pieces of groups in turn, and say of each piece who has it and whether it
    is the last one of its group. The first ones are at work before all are started."""
    places = count()
    for texts in groups:
        size = max(len(texts) * _PIECE // max(sum(map(len, texts)), 1), 1)
        for piece in ranges_of(len(texts), size):
            place = next(places) % processes
            if place == len(started):
                started.append(_Process(tokenize))
            started[place].give(texts[piece.start : piece.stop])
            yield started[place], piece.stop == len(texts)
    for process in started:  # it takes some time, for which nobody has to wait at the end
        process.give(())


def _receive(pieces: "Iterator[tuple[_Process, bool]]") -> Iterator[TokenBatch]:
    parts: list[_Sent] = []
    for process, last in pieces:
        parts.append(process.take())
        if last:
            yield _join(parts)
            parts = []


def _kill(started: "Sequence[_Process]") -> None:
    for process in started:
        process.kill()


class _Process:
    """A process that tokenises what it is given, in order, until it is given nothing."""

    def __init__(self, tokenize: Tokenize) -> None:
        self._connection, theirs = _FORK.Pipe()
        work = tokenize, theirs, self._connection
        # A daemon: however this program ends, it does not wait for the process.
        self._process = _FORK.Process(target=_work, args=work, daemon=True)
        self._process.start()
        theirs.close()  # so that its death closes the connection
        self.kill, self.join = self._process.kill, self._process.join

    def give(self, texts: Sequence[str]) -> None:
        try:
            self._connection.send(texts)
        except OSError as error:
            raise self._death() from error

    def take(self) -> "_Sent":
        """The tokens of the first texts of which they were not taken yet."""
        try:
            while not self._connection.poll(_LOOK):
                # Another process, forked meanwhile, may hold the connection open.
                if not self._process.is_alive() and not self._connection.poll():
                    raise EOFError
            answer: _Sent | Exception = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _death(self) -> ChildProcessError:
        self._process.join(_LOOK)
        code = self._process.exitcode
        how = f"by {signal.Signals(-code).name}" if code and code < 0 else f"with status {code}"
        return ChildProcessError(
            f"a process that tokenises ahead was ended {how}: the machine, or this container, may "
            "be out of memory"
        )


class _Sent(NamedTuple):
    """Tokens in as few bytes as there need be.

    Attributes:
        ids: int32 ``[T]``, as no vocabulary has more.
        cu_seqlens, max_seqlen: of the texts.
        keys, pooled: what :class:`~sparton.types.TokenRows` hold, if there are any.
    """

    ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int
    keys: tuple[NDArray[np.int64], NDArray[np.int32], int] | None
    pooled: tuple[NDArray[np.int64], NDArray[np.int32], int] | None

    @classmethod
    def of(cls, tokens: TokenBatch) -> "_Sent":
        ids, cu_seqlens = tokens.input_ids.numpy(), tokens.cu_seqlens.numpy()
        keys, pooled = (
            each and (each.rows.numpy(), each.cu_seqlens.numpy(), each.max_seqlen)
            for each in (tokens.keys, tokens.pooled)
        )
        return cls(ids.astype(np.int32), cu_seqlens, tokens.max_seqlen, keys, pooled)

    def tokens(self) -> TokenBatch:
        starts = np.repeat(self.cu_seqlens[:-1], np.diff(self.cu_seqlens))
        keys, pooled = (
            each and TokenRows(torch.from_numpy(each[0]), torch.from_numpy(each[1]), each[2])
            for each in (self.keys, self.pooled)
        )
        return TokenBatch(
            torch.from_numpy(self.ids.astype(np.int64)),
            torch.from_numpy(np.arange(len(starts)) - starts),
            torch.from_numpy(self.cu_seqlens),
            self.max_seqlen,
            keys,
            pooled,
        )


def _join(parts: Sequence[_Sent]) -> TokenBatch:
    """The tokens of a group out of those of its pieces."""
    if any(part.keys or part.pooled for part in parts):
        return TokenBatch.concatenate([part.tokens() for part in parts])
    # NumPy: torch would wake a thread for every core, all of which are at work.
    lengths = np.concatenate([np.diff(part.cu_seqlens) for part in parts])
    return _Sent(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([[0], lengths.cumsum()]).astype(np.int32),
        max(part.max_seqlen for part in parts),
        None,
        None,
    ).tokens()


def _work(tokenize: Tokenize, connection: "Connection", other_end: "Connection") -> None:
    """What a process does until it is told to end, or the one that started it is no more."""
    other_end.close()  # else that would never be known
    gc.freeze()  # what was inherited, memory of a GPU too, is not for this process to free
    # Ctrl-C reaches every process of a terminal; the one that started this one ends it. What that
    # one does at other signals is not for this one to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # Threads of others are not there after a fork, and the other cores have processes of their own.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while texts := connection.recv():
            connection.send(_answer(tokenize, texts))
    os._exit(0)  # what it has inherited is not for it to end


def _answer(tokenize: Tokenize, texts: Sequence[str]) -> _Sent | Exception:
    try:
        return _Sent.of(tokenize(texts))
    except Exception as error:
        error.add_note(f"in a process that tokenises ahead:\n{format_exc()}")
        return error
