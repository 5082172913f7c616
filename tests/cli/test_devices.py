"""How many processes a machine has devices for."""

import pytest
import torch

from sparton.cli.devices import check_gpus, neighbours
from sparton.training.distributed import World


@pytest.mark.parametrize(
    ("found", "message"),
    [(1, "gpus=9, but this machine has 1 GPU: set gpus=1"), (8, "has 8 GPUs: set gpus=8")],
)
def test_more_processes_than_gpus_are_refused(found, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    with pytest.raises(ValueError, match=message):
        check_gpus(9, None)
    check_gpus(found, None)
    check_gpus(9, "cpu")


def test_without_gpus_processes_share_the_cores(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_gpus(9, None)


def test_neighbours_are_the_gpus_of_the_same_machine_that_can_be_used(monkeypatch):
    """Of four ranks on a machine, the third has its GPU to itself."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    asked = []

    def zeros(size: int, device: torch.device) -> None:
        asked.append(device.index)
        if device.index == 2:
            raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(torch, "zeros", zeros)
    third, last = (torch.device("cuda", number) for number in (1, 3))
    assert neighbours(World(0, 8, torch.device("cuda", 0), one_machine=False)) == [third, last]
    assert asked == [1, 2, 3]
    assert (
        neighbours(World(0, 4, torch.device("cpu")))
        == neighbours(World(0, 1, torch.device("cuda", 0)))
        == []
    )
