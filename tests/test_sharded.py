"""Tensors that are spread over ranks."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

from sparton.sharded import is_sharded, whole

COMMANDS = ["sparton.cli.evaluation", "sparton.cli.encoding", "sparton.retriever"]


@pytest.mark.parametrize("module", COMMANDS)
def test_commands_import_nothing_that_sharding_needs(module):
    asked = "torch.distributed.tensor"
    code = f"import {module}, sys; sys.exit({asked!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_those_of_a_rank_are_told_apart_and_made_whole(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        tensor = torch.arange(6.0)
        held = distribute_tensor(tensor, DeviceMesh("cpu", [0]), [Replicate()])
        assert is_sharded(held)
        assert not is_sharded(tensor)
        assert torch.equal(whole(held), tensor)
        assert whole(tensor) is tensor
    finally:
        dist.destroy_process_group()
