"""How many processes a machine has devices for."""

import pytest
import torch

from sparton.cli.devices import check_gpus


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
