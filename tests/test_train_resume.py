"""Runs of every kind that are killed: the same command ends bit-identical to a run in one piece."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparton.training.status import Status, read_status
from tests.forking import Forked, environment
from tests.test_train import read_records
from tests.test_train_kinds import CSR, JOINT
from tests.test_train_queries import LEARNED, SMALL

MORTAL = [
    "optimizer._target_=tests.sweeps.broken.Mortal",
    "steps=4",
    "checkpoint_every=2",
    "evaluation=none",
]
QUICK = ["experiment=quickstart", "debug=tiny", "log_every=1"]
RANDOM = ["backbone=random", "backbone.hidden_size=32", "backbone.layers=1", "backbone.heads=2"]
KINDS = {
    "compiled": [*QUICK, *RANDOM, "backbone.compile=true"],  # bit-identical with one thread
    "half-residual": [*QUICK, *RANDOM, "precision=bf16", "backbone.half_residual=true"],
    "fp16": [*QUICK, "precision=fp16", "loss.temperature=0.05"],  # whose first gradients overflow
    "averaged": [*QUICK, *RANDOM, "averaging=ema", "averaging.decay=0.5"],
    "csr": [*QUICK, *CSR, "head.freeze_backbone=false"],
    "joint": [*QUICK, *JOINT, "loss=joint"],
    "static": [*QUICK, *LEARNED],
    "separate": [*QUICK, *SMALL],
    "lora": [*QUICK, *RANDOM, "precision=bf16", "backbone.lora={rank: 4, dropout: 0.1}"],
}


# fp16 is refused on a CPU, where it is slow.
ANY_PRECISION = """
from sparton.training.precision import Precision
Precision.__post_init__ = lambda self: None
"""


@pytest.fixture(scope="module")
def sparton() -> Iterator[Forked]:
    commands = Forked()
    yield commands
    commands.close()


def train(sparton: Forked, folder: Path, settings: list[str], end: str = "- -"):
    words = ["train", *settings, *MORTAL, f"hydra.run.dir={folder}"]
    return sparton(words, folder.parent, ANY_PRECISION if "fp16" in str(words) else "", END=end)


def left(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight of the model, every state of the optimizer, and the loss scale."""
    state = torch.load(max(folder.glob("checkpoints/*.pt")), weights_only=True)
    scale = {f"scaler.{name}": torch.tensor(value) for name, value in state["scaler"].items()}
    tensors = scale | {f"trained.{name}": value for name, value in state["encoder"].items()}
    tensors |= {f"averaged.{name}": value for name, value in (state["averages"] or {}).items()}
    for number, moments in state["optimizer"]["state"].items():
        tensors |= {f"{number}.{name}": value for name, value in moments.items()}
    for file in (folder / "model").rglob("*.safetensors"):
        tensors |= {f"{file.parent.name}.{name}": value for name, value in load_file(file).items()}
    return tensors


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="bit-identical is promised on a CPU only")
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_bit_identical(sparton, tmp_path, kind):
    whole = train(sparton, tmp_path / "whole", KINDS[kind])
    assert whole.returncode == 0, whole.stderr
    killed = tmp_path / "killed"
    assert train(sparton, killed, KINDS[kind], end="0 killed").returncode == -signal.SIGKILL
    assert read_status(killed) == Status("running")
    again = train(sparton, killed, KINDS[kind])
    assert again.returncode == 0, again.stderr
    assert (killed / "manifest-from-step-2.json").exists(), "it began anew"
    expected, found = left(tmp_path / "whole"), left(killed)
    assert expected.get("scaler.scale", 0) < 2**16, "no gradient has overflowed"
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
    losses = [
        [record["loss"] for record in read_records(tmp_path / name)] for name in ("whole", "killed")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert len(set(losses[0])) == 4, "a run that does not change says nothing"


@pytest.mark.gpu
def test_on_a_gpu_a_killed_run_goes_on_with_its_loss_scale(sparton, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(sparton, whole, KINDS["fp16"]).returncode == 0
    assert train(sparton, killed, KINDS["fp16"], end="0 killed").returncode == -signal.SIGKILL
    again = train(sparton, killed, KINDS["fp16"])
    assert again.returncode == 0, again.stderr
    assert (killed / "manifest-from-step-2.json").exists(), "it began anew"
    expected, found = left(whole), left(killed)
    scales = [name for name in expected if name.startswith("scaler.")]
    assert scales and all(expected[name] == found[name] for name in scales)
    losses = [[record["loss"] for record in read_records(folder)] for folder in (whole, killed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.slow
def test_nan_in_a_compiled_model_is_caught_at_its_step_between_two_log_lines(sparton, tmp_path):
    tmp_path = tmp_path / "run"
    ended = train(sparton, tmp_path, [*KINDS["compiled"], "log_every=100"], end="0 nan")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "the loss was not finite at step 4; nothing has been saved since" in ended.stderr
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["step-00000002.pt"]
    assert [record["step"] for record in read_records(tmp_path)] == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "lacking"),
    [(1, "status.json"), (2_000, "manifest.json"), (40_000, "model"), (200_000, "checkpoint")],
)
def test_a_full_disk_is_what_the_user_reads_and_nothing_half_written_stays(tmp_path, size, lacking):
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size},) * 2)\n"
    code += "from sparton.cli.main import main; main()"
    words = [*QUICK, "evaluation.every=2" if lacking == "model" else "evaluation=none"]
    command = [sys.executable, "-c", code, "train", *words, f"hydra.run.dir={tmp_path}"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr and "Logging error" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("sparton train: ") and lacking in last and "could not be written" in last
    assert not [path for end in ("tmp", "old") for path in tmp_path.rglob(f"*.{end}")]
    if tmp_path.joinpath("status.json").exists():
        assert read_status(tmp_path).state == "failed"
