"""Tokens are the same whoever makes them, in order, and nothing that made them is left."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.backbones import word_tokenizer
from sparton.retrieval import tokenising
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.tokenising import tokenized, usual_processes
from sparton.types import Markup, TextForm, TokenBatch
from tests.datasets.test_parcels import assert_same
from tests.retrieval.test_encoding import NumberTokenizer, VectorEncoder, random_texts

ROOT = Path(__file__).resolve().parents[2]
WORDS = [f"w{number}" for number in range(30)]
MARKUPS = {
    "plain": Markup(),
    "keys": Markup(query_marker=5, expansion=4),
    "pooled": Markup(query_prompt="w1 w2", include_prompt=False),
    "both": Markup(expansion=4, query_prompt="w1 w2", include_prompt=False),
}
PROGRAM = """
    from itertools import repeat
    from multiprocessing import active_children
    from sparton.retrieval.tokenising import tokenized
    from sparton.types import TokenBatch

    def tokenize(texts):
        return TokenBatch.from_lists([[1]] * len(texts))

    with tokenized(tokenize, repeat(["a", "b"]), 3) as coming:
        for number, _ in enumerate(coming):
            if number == 9:
                print(*(child.pid for child in active_children()), flush=True)
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not active_children()
    assert set(threading.enumerate()) == before


@pytest.fixture
def many_texts(monkeypatch) -> None:
    """Four of them, and processes for whatever there is to do."""
    monkeypatch.setattr(tokenising, "_DEVICES", {"cpu"})
    monkeypatch.setattr(tokenising, "_FEWEST_TEXTS", 1)
    monkeypatch.setattr(tokenising, "_PIECE", 40)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))


def groups(number: int) -> list[list[str]]:
    texts = [" ".join(WORDS[: row % 7]) for row in range(5 * number)]
    return [texts[5 * row : 5 * row + 5] for row in range(number)]


@pytest.mark.parametrize("processes", [0, 1, 2, 5])
@pytest.mark.parametrize("characters", [1, 12, 2**17])
@pytest.mark.parametrize("name", MARKUPS)
def test_tokens_are_those_of_the_tokenizer(monkeypatch, name, characters, processes):
    monkeypatch.setattr(tokenising, "_PIECE", characters)
    tokenizer = PackedTokenizer(word_tokenizer(WORDS, 16), 8, 16, markup=MARKUPS[name])
    expected = [tokenizer.queries(group) for group in groups(4)]
    assert (expected[0].keys is None) == (name in ("plain", "pooled"))
    assert (expected[0].pooled is None) == (name in ("plain", "keys"))
    with tokenized(tokenizer.queries, iter(groups(4)), processes) as coming:
        assert_same((*coming,), (*expected,))
        assert len(active_children()) <= processes


def encoded(texts: list[str]) -> tuple[torch.Tensor, ...]:
    found = encode_texts(VectorEncoder(True), NumberTokenizer(), texts, "document")
    sparse, tokens = found.sparse, found.tokens
    return sparse.values, sparse.terms, sparse.cu_seqlens, tokens.values, tokens.cu_seqlens


def test_representations_are_those_of_a_thread(many_texts, monkeypatch):
    started, start = [], tokenising._Process
    monkeypatch.setattr(tokenising, "_Process", lambda read: started.append(read) or start(read))
    texts = random_texts(700)
    found = encoded(texts)
    assert len(started) == 3
    monkeypatch.setattr(tokenising, "_FEWEST_TEXTS", 701)
    assert_same(found, encoded(texts))
    assert len(started) == 3, "too few texts"


def test_processes_read_texts_as_asked(many_texts):
    tokenizer = PackedTokenizer(word_tokenizer(WORDS, 16), 8, 16)
    texts, lengths = [text for group in groups(120) for text in group], []
    for form in (TextForm(), TextForm(document_length=3)):
        found = encode_texts(VectorEncoder(), tokenizer, texts, "document", form=form)
        lengths.append(int(found.tokens.lengths.max()))
    assert lengths == [7, 2], "the first word takes no part"


@pytest.mark.parametrize(
    ("device", "texts", "cores", "together", "expected"),
    [
        ("cuda", 2**13, 12, "", 11),
        ("cuda", 2**13 - 1, 12, "", 0),
        ("cpu", 2**20, 12, "", 0),
        ("cuda", 2**20, 3, "", 0),
        ("cuda", 2**20, 100, "", 16),
        ("cuda", 2**20, 12, "2", 5),
        ("cuda", 2**20, 12, "3", 3),
        ("cuda", 2**20, 12, "4", 0),
    ],
)
def test_how_many_processes(monkeypatch, device, texts, cores, together, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if together:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", together)
    assert usual_processes(torch.device(device), texts) == expected


def test_a_process_that_may_start_none_starts_none(many_texts, monkeypatch):
    assert usual_processes(torch.device("cpu"), 10) == 3
    monkeypatch.setitem(tokenising.current_process()._config, "daemon", True)
    assert usual_processes(torch.device("cpu"), 10) == 0


def test_what_fails_in_a_process_fails_here_after_what_was_before_it():
    found = []
    numbers = iter([["1 2"], ["3"], ["4", "nonsense"], ["5"]])
    with (
        pytest.raises(ValueError, match=r"invalid literal .*nonsense") as raised,
        tokenized(NumberTokenizer().queries, numbers, 2) as coming,
    ):
        found.extend(tokens.input_ids.tolist() for tokens in coming)
    assert found == [[1, 2], [3]]
    assert "in queries" in raised.value.__notes__[0], "where it was"


def test_what_fails_in_reading_fails_here():
    def texts() -> Iterator[list[str]]:
        yield from (["1"], ["2"])
        raise OSError("the third")

    with (
        pytest.raises(OSError, match="the third"),
        tokenized(NumberTokenizer().queries, texts(), 2) as coming,
    ):
        assert [tokens.input_ids.item() for tokens in coming] == [1, 2]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda each: each.name)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_process_that_is_killed_ends_all(hidden, number, monkeypatch):
    monkeypatch.setattr(tokenising, "_LOOK", 0.05)
    if hidden:  # as where other processes have the same connections
        monkeypatch.setattr(tokenising._FORK, "Pipe", kept(tokenising._FORK.Pipe, ends := []))
    with (
        handled(signal.SIGTERM),
        pytest.raises(ChildProcessError, match=rf"was ended by {number.name}: .*memory"),
        tokenized(NumberTokenizer().queries, repeat(["1 2", "3"]), 2) as coming,
    ):
        for _ in range(2):  # by now both are at work
            next(coming)
        os.kill(active_children()[0].pid, number)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            next(coming)
    if hidden:
        assert len(ends) == 2


@contextmanager
def handled(number: signal.Signals) -> Iterator[None]:
    """This program does nothing at a signal."""
    before = signal.signal(number, lambda *_: None)
    yield
    signal.signal(number, before)


def test_ctrl_c_is_left_to_the_program():
    with tokenized(NumberTokenizer().queries, repeat(["1 2", "3"]), 1) as coming:
        next(coming)
        os.kill(active_children()[0].pid, signal.SIGINT)
        for _ in range(50):
            next(coming)


def kept(pipe, ends: list[int]):
    def both():
        mine, theirs = pipe()
        ends.append(os.dup(theirs.fileno()))
        return mine, theirs

    return both


def test_what_is_left_early_ends_at_once_and_has_gone_no_further_than_a_few():
    taken = 0

    def texts() -> Iterator[list[str]]:
        nonlocal taken
        while True:
            taken += 1
            yield ["1 2", "3"]

    with tokenized(NumberTokenizer().queries, texts(), 3) as coming:
        next(coming)
    assert taken < 20


def test_texts_that_take_for_ever_are_not_waited_for():
    """Neither by the caller nor by the thread, which has more for a process than it takes."""
    giving = threading.Event()

    def slow(texts: list[str]) -> TokenBatch:
        if texts == ["slow"]:
            time.sleep(600)
        return NumberTokenizer().queries(texts)

    def texts() -> Iterator[list[str]]:
        yield from (["1"], ["slow"])
        giving.set()
        yield from repeat(["1 " * 2**20])

    begin = time.monotonic()
    with tokenized(slow, texts(), 1) as coming:
        next(coming)
        assert giving.wait(20)
        time.sleep(0.1)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda each: each.name)
def test_a_program_that_is_ended_leaves_no_process(number):
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = [int(word) for word in program.stdout.readline().split()]
    if number == signal.SIGINT:
        os.killpg(program.pid, number)  # as Ctrl-C does
    else:
        program.kill()
    _, errors = program.communicate(timeout=60)  # children have the same streams
    assert program.returncode == -number, errors
    assert errors.count("Traceback") == (number == signal.SIGINT), "only the program speaks"
    assert len(children) == 3
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() and not gone(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether a process has ended of which nobody has asked how."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
