"""What is computed ahead comes in order, in time, and no longer than it is wanted."""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from sparton.retrieval.batches import _bounds, ahead

PATIENCE = 10  # seconds


def test_the_next_items_are_computed_in_a_thread_while_one_is_used():
    computed = [threading.Event() for _ in range(9)]

    def items() -> Iterator[tuple[int, int]]:
        for number, event in enumerate(computed):
            event.set()
            yield number, threading.get_ident()

    with ahead(items()) as coming:
        number, thread = next(coming)
        assert (number, thread == threading.get_ident()) == (0, False)
        assert computed[1].wait(PATIENCE)
        assert not computed[-1].is_set(), "no more than a few"
        assert list(coming) == [(number, thread) for number in range(1, 9)]


def test_an_error_comes_after_what_was_before_it():
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise ValueError("the third")

    found = []
    with pytest.raises(ValueError, match="the third"), ahead(items()) as coming:
        found.extend(coming)
    assert found == [1, 2]


def test_nothing_is_computed_after_the_block():
    items = iter(range(1000))
    with ahead(items) as coming:
        assert next(coming) == 0
    left = list(items)
    assert 900 < len(left) < 1000
    with pytest.raises(StopIteration):
        next(items)


def test_threads_take_shorter_turns_within_the_block():
    usual = sys.getswitchinterval()
    with pytest.raises(ValueError, match="within"), ahead(iter([1])):
        assert sys.getswitchinterval() < usual / 5
        raise ValueError("within")
    assert sys.getswitchinterval() == usual


def test_turns_are_short_until_the_last_of_overlapping_blocks_ends():
    usual, first, second = sys.getswitchinterval(), ExitStack(), ExitStack()
    for block in (first, second):
        block.enter_context(ahead(iter([1])))
    first.close()
    assert sys.getswitchinterval() < usual / 5
    second.close()
    assert sys.getswitchinterval() == usual


@pytest.mark.parametrize(("width", "tokens"), [(384, 2**18), (1024, 2**18), (4096, 2**16)])
def test_a_gpu_gets_fewer_tokens_of_wider_states(width, tokens):
    encoder = SimpleNamespace(backbone=SimpleNamespace(hidden_size=width), vocabulary_size=30_522)
    gpu = torch.device("cuda")
    for each in (encoder, SimpleNamespace(document=encoder, vocabulary_size=30_522)):
        assert _bounds(each, ("sparse",), gpu, None)[0] == tokens
    assert _bounds(encoder, ("sparse",), gpu, 5)[0] == 5
    assert _bounds(encoder, ("sparse",), torch.device("cpu"), None)[0] == 2**12
    assert _bounds(SimpleNamespace(), ("tokens",), gpu, None)[0] == 2**18
