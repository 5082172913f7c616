"""Several processes of one run: one dies, and the run goes on with any number of them."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sparton.training.status import Status, read_status
from tests.test_train import read_records, run_command, run_here
from tests.test_train_resume import left

# A small rate: Adam makes large updates of the rounding errors of tiny gradients.
MORTAL = ("optimizer._target_=tests.sweeps.broken.Mortal", "optimizer.lr=1e-4", "evaluation=none")


pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="two processes of NCCL cannot share the one GPU"
)


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> list[float]:
    """Of a run in one piece and one process."""
    records = run_here(tmp_path_factory.mktemp("whole"), *MORTAL)
    return [record["loss"] for record in records]


def start(
    folder: Path, gpus: int, end: str = "- -", others: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    command = run_command(folder, *MORTAL, f"gpus={gpus}", *others)
    environment = os.environ | {"END": end}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=environment
    )


def goes_on(folder: Path, gpus: int, losses: list[float], others: Sequence[str] = ()) -> None:
    """From the checkpoint of step 2 to the end, as if nothing had happened."""
    process = start(folder, gpus, others=others)
    assert process.returncode == 0, process.stderr
    assert (process.stdout + process.stderr).count("its ramp is longer") == 2  # of both sides
    assert read_status(folder) == Status("ok")
    assert (folder / "manifest-from-step-2.json").exists()
    found = [record["loss"] for record in read_records(folder)]
    assert found == pytest.approx(losses, rel=1e-4)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_one_process_goes_on(tmp_path, losses):
    process = start(tmp_path, gpus=2, end="1 killed")
    assert process.returncode == 1
    said = [line for line in process.stderr.splitlines() if line]
    assert len(said) == 1 and said[0].startswith("train.py: rank 1 was ended by SIGKILL"), said
    assert read_status(tmp_path).state == "killed"
    goes_on(tmp_path, 1, losses)


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_another_number_and_as_it_began_alone(tmp_path, losses):
    sharded = ("sharding=full", "micro_batch=null")
    assert start(tmp_path, gpus=2, end="1 killed", others=sharded).returncode == 1
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["step-00000002"]
    process = start(tmp_path, gpus=2)
    assert process.returncode == 1
    assert "weights were sharded, and here they are not to be: go on as it began" in process.stderr
    goes_on(tmp_path, 1, losses, sharded)
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_nan_on_one_rank_ends_all_with_one_sentence_that_names_the_step(tmp_path, losses):
    process = start(tmp_path, gpus=2, end="1 nan")
    assert process.returncode == 1
    said = [line for line in process.stderr.splitlines() if line]
    assert len(said) == 1 and "the loss was not finite at step 4;" in said[0], said
    assert read_status(tmp_path).message in said[0]
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["step-00000002.pt"]
    goes_on(tmp_path, 2, losses)


@pytest.mark.slow
def test_after_one_process_two_go_on(tmp_path, losses):
    assert start(tmp_path, gpus=1, end="0 killed").returncode < 0
    goes_on(tmp_path, 2, losses)


@pytest.mark.slow
def test_a_bug_on_a_rank_is_shown_with_its_place_and_alone(tmp_path):
    process = start(tmp_path, gpus=2, end="1 bug")
    assert process.returncode == 1
    assert process.stderr.count("bug on rank 1") == 1
    assert "Connection closed" not in process.stderr
    assert read_status(tmp_path) == Status("failed", "bug on rank 1")


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
            ],
        ),
    ],
)
def test_rank_0_of_torchrun_is_killed_and_the_same_command_goes_on(tmp_path, device):
    def torchrun(folder: Path, end: str = "- -") -> subprocess.CompletedProcess:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        environment = os.environ | {"END": end}
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = run_command(folder, *MORTAL, launcher=(sys.executable, *launcher))
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = torchrun(whole)
    assert process.returncode == 0, process.stderr
    process = torchrun(killed, end="0 killed")
    last = killed / "checkpoints" / "step-00000002.pt"
    assert process.returncode == 1 and time.time() - last.stat().st_mtime < 60
    status = read_status(killed)
    assert status.state == "killed" and "which torchrun sends when it or another" in status.message
    told = f"{status.message}; the same command goes on from the last checkpoint, or"
    assert (process.stdout + process.stderr).count(told) == 1
    process = torchrun(killed)
    assert process.returncode == 0, process.stderr
    assert read_status(killed) == Status("ok")
    assert (killed / "manifest-from-step-2.json").exists(), "it began anew"
    losses = [[record["loss"] for record in read_records(each)] for each in (whole, killed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    if device == "cpu":
        expected, found = left(whole), left(killed)
        assert expected.keys() == found.keys() and losses[0] == losses[1]
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
