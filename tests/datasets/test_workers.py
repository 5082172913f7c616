"""Worker processes that die, and programs that are interrupted."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sparton.datasets.parcels import pack
from sparton.datasets.workers import Batches, prepare_worker
from sparton.types import TokenBatch, TrainBatch

ROOT = Path(__file__).resolve().parents[2]
FAULTY, WRONG = 2**40, 2**41
PROGRAM = """
    from multiprocessing import active_children
    from tests.datasets.test_workers import FAULTY, loader

    for number, batch in enumerate(loader(FAULTY)):
        if number == 20:
            print(*(child.pid for child in active_children()), flush=True)
"""


class Numbers(Dataset[TrainBatch]):
    """Batch ``number`` holds that token."""

    def __getitem__(self, number: int) -> TrainBatch:
        if number == FAULTY:
            raise RuntimeError("a fault of its own")
        if number == WRONG:
            raise ValueError("a text of two lines:\nValueError is a word of it")
        tokens = TokenBatch.from_lists([[number]])
        return TrainBatch(tokens, tokens)


def loader(size: int, start: int = 0) -> Batches:
    return Batches(
        DataLoader(
            Numbers(),
            batch_size=None,
            sampler=range(start, size),
            num_workers=2,
            collate_fn=pack,
            worker_init_fn=prepare_worker,
        )
    )


def test_batches_come_in_order_and_again():
    batches = loader(7)
    assert len(batches) == 7
    for _ in range(2):
        assert [batch.queries.input_ids.item() for batch in batches] == list(range(7))


def test_a_killed_worker_ends_the_program_with_what_happened():
    with pytest.raises(ChildProcessError, match=r"has died: .*out of memory.*--shm-size"):
        wait_for_a_death(iter(loader(FAULTY)))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("DataLoader worker (pid(s) 7) exited unexpectedly", ChildProcessError),
        ("Pin memory thread exited unexpectedly", RuntimeError),
    ],
)
def test_what_torch_finds_out_amid_a_parcel_is_a_death_too(fault, kind):
    def parcels():
        raise RuntimeError(fault)
        yield

    with pytest.raises(kind, match=re.escape(fault)) as caught:
        next(iter(Batches(parcels())))
    assert type(caught.value) is kind


def wait_for_a_death(batches) -> None:
    next(batches)
    os.kill(active_children()[0].pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        next(batches)
        torch.zeros(10).sum()


def test_errors_of_a_worker_stay_what_they_are():
    with pytest.raises(RuntimeError, match="a fault of its own"):
        list(loader(FAULTY + 1, start=FAULTY - 1))


def test_what_the_user_can_mend_comes_without_the_traceback_of_the_worker():
    with pytest.raises(ValueError) as raised:
        list(loader(WRONG + 1, start=WRONG - 1))
    assert str(raised.value) == "a text of two lines:\nValueError is a word of it"
    assert "Traceback" in str(raised.value.__cause__)


@pytest.mark.slow
def test_errors_of_this_process_stay_what_they_are():
    """Not every error can be made from its words alone."""

    class Undecodable(Dataset[TrainBatch]):
        def __getitem__(self, number: int) -> TrainBatch:
            b"\xff".decode()
            raise AssertionError

    with pytest.raises(UnicodeDecodeError, match="0xff"):
        list(Batches(DataLoader(Undecodable(), batch_size=None, sampler=[0], collate_fn=pack)))


def test_an_interrupted_program_leaves_no_process():
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = [int(word) for word in process.stdout.readline().split()]
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors
    assert len(workers) == 2 and not any(map(alive, workers))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
