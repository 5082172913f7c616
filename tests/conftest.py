"""Without a GPU, Triton kernels run in its interpreter; and no test asks the hub. Both must be
chosen before Triton and the hub's library are imported, hence here and not in folders of tests."""

import gc
import logging
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests import interpreter

    interpreter.quicken()


def pytest_configure() -> None:
    # Where a shell runs the tests in the background they ignore Ctrl-C, with nohup a hangup, and
    # so would programs that they start and end so.
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, None, None]:
    """What is imported stays: the garbage collector need not look at it, now and in each test."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped where there is none. Of a test marked ``quick(N)`` the
    cases behind the first N are slow tests."""
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("gpu"):
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
            continue
        marker = item.get_closest_marker("quick")
        if marker is None:
            continue
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] > marker.args[0]:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def the_same_random_numbers() -> None:
    """For tests that draw some without a generator of their own."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_handlers_of_others() -> Iterator[None]:
    """A command sets up the logging of its whole process: what it leaves there would write the
    messages of later tests into a folder that may be gone."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in root.handlers[:]:
        if handler not in before and type(handler) in (logging.FileHandler, logging.StreamHandler):
            root.removeHandler(handler)
            handler.close()
