"""Objects of all ranks on rank 0."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sparton.training import collecting
from sparton.training.distributed import World
from tests.training.ranks import on_ranks


class Held(NamedTuple):
    name: str
    values: Tensor
    parts: list


def held(rank: int) -> Held:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(3 + rank, 8, generator=generator)
    kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool]
    parts = [values.to(kind) for kind in kinds]
    views = [values.t(), values[1:2, 3], values[:0], values.sum().requires_grad_()]
    return Held(f"of {rank}", values, [*parts, *views, {"nothing": None, "number": rank}])


def equal(found: object, expected: object) -> bool:
    if isinstance(expected, Tensor):
        same = isinstance(found, Tensor) and found.dtype == expected.dtype
        return same and found.shape == expected.shape and bool((found == expected).all())
    if isinstance(expected, tuple | list):
        return all(map(equal, found, expected)) and type(found) is type(expected)
    return found == expected


def collected(world: World, rounds: int) -> list:
    return [world.collect(held(world.rank + number)) for number in range(rounds)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [2, 3])
def test_rank_0_has_what_all_have_round_after_round(size, tmp_path):
    first, *others = on_ranks(size, tmp_path, collected, 2)
    assert others == [[None, None]] * (size - 1)
    for number, found in enumerate(first):
        assert len(found) == size
        for rank, given in enumerate(found):
            assert equal(given, held(rank + number))
            assert not equal(given, held(rank + number + 1))


class Noted:
    """Notes what is sent, and when its end is waited for."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.sent_before_a_wait: list[int] = []

    def send(self, part: Tensor, rank: int) -> None:
        self.isend(part, rank).wait()

    def isend(self, part: Tensor, rank: int) -> "Noted":
        assert rank == 0
        self.sent.append(part)
        return self

    def wait(self) -> None:
        self.sent_before_a_wait.append(len(self.sent))


def test_the_memory_of_tensors_is_in_no_pickle(monkeypatch):
    monkeypatch.setattr(collecting, "dist", noted := Noted())
    values = torch.randn(1000)
    assert collecting.collect([values, torch.zeros(0)], 1, 2) is None
    number, sizes, head, memory = noted.sent
    assert int(number) == 2
    assert sizes.tolist() == [len(head), 4000]
    assert len(head) < 1000
    assert memory.data_ptr() == values.data_ptr()


def test_no_part_waits_for_the_one_before(monkeypatch):
    monkeypatch.setattr(collecting, "dist", noted := Noted())
    collecting.collect([torch.randn(3), torch.randn(4)], 1, 2)
    assert noted.sent_before_a_wait == [1, 2, 5, 5, 5]
