"""Several processes encode together what one encodes alone, to the bit."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from sparton.representations import Representations
from sparton.retrieval import encoding
from sparton.retrieval.encoding import encode_texts
from tests.retrieval.test_encoding import NumberTokenizer, VectorEncoder, random_texts


class Thread:
    """A process of a crew, in a thread of this one."""

    def __init__(self, rank: int, size: int, table: list[Any], meeting: threading.Barrier) -> None:
        self.rank, self.size, self._table, self._meeting = rank, size, table, meeting

    def collect(self, own: Any) -> list[Any] | None:
        self._table[self.rank] = own
        self._meeting.wait(30)
        found = list(self._table) if self.rank == 0 else None
        self._meeting.wait(30)
        return found

    def share(self, value: Any) -> Any:
        self._table[self.rank] = value
        self._meeting.wait(30)
        found = self._table[0]
        self._meeting.wait(30)
        return found


def crew_of(size: int) -> list[Thread]:
    table: list[Any] = [None] * size
    meeting = threading.Barrier(size)
    return [Thread(rank, size, table, meeting) for rank in range(size)]


def together(texts: list[str], size: int) -> list[Representations]:
    """What each process of a crew gets."""

    def work(crew: Thread) -> Representations:
        encoder = VectorEncoder(sparse=True)
        found = encode_texts(encoder, NumberTokenizer(), texts, "document", crew=crew)
        encoded.append((crew.rank, sum(number for number, _ in encoder.batches)))
        return found

    encoded: list[tuple[int, int]] = []
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(work, crew_of(size)))
    assert sum(number for _, number in encoded) == len(texts)  # none of them twice
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("texts", [1, 9, 40])
def test_a_crew_gives_its_first_process_what_one_makes_alone(monkeypatch, size, texts):
    monkeypatch.setattr(encoding, "_SMALLEST_GROUP", 4)
    given = random_texts(texts)
    alone = encode_texts(VectorEncoder(sparse=True), NumberTokenizer(), given, "document")
    first, *others = together(given, size)
    assert others == [Representations()] * (size - 1)
    for ours, theirs in ((first.sparse, alone.sparse), (first.tokens, alone.tokens)):
        assert ours.values.equal(theirs.values)
        assert ours.cu_seqlens.equal(theirs.cu_seqlens)
    assert first.sparse.terms.equal(alone.sparse.terms)


def test_a_fault_ends_the_process_that_has_it(monkeypatch):
    monkeypatch.setattr(encoding, "_SMALLEST_GROUP", 2)
    first, second = crew_of(2)

    class Broken(VectorEncoder):
        def encode(self, *_: Any) -> Representations:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        encode_texts(Broken(), NumberTokenizer(), random_texts(20), "document", crew=second)
    del first


@pytest.mark.parametrize(
    ("number", "first", "sizes"),
    [
        (1, None, [1]),
        (600, None, [256, 256, 88]),
        (600, 64, [64, 128, 256, 152]),
        (9000, 300, [300, *[562] * 15, 270]),
        (0, 64, [0]),
    ],
)
def test_groups_begin_small_and_lose_no_row(number, first, sizes):
    groups = encoding.groups_of(np.arange(number), first)
    assert [len(group) for group in groups] == sizes
    assert np.concatenate(groups).tolist() == list(range(number))
