"""Trainings whose weights are sharded: killed ones go on with any number of ranks, and checkpoints
and models are kept as those of one process are.

The other side of each comparison is a training in one process whose weights are whole.
"""

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from sparton.errors import CheckpointError, OtherRunError
from sparton.models.encoder import Encoder
from sparton.models.folders import save_encoder
from sparton.sharded import whole
from sparton.training.averaging import AveragedWeights, ExponentialAverage
from sparton.training.distributed import World
from sparton.training.loop import LoopSettings, Trainer
from sparton.training.optimization import build_optimizer
from sparton.training.precision import Precision
from sparton.training.schedules import LinearSchedule
from sparton.training.sharding import place_weights
from sparton.training.throughput import ThroughputMeter
from tests.training.ranks import CPU, on_ranks
from tests.training.test_sharding import ALONE, CASES, exact_step, global_batch, share

STEPS = 4
LENGTHS = {"query_length": 12, "document_length": 12}


def make_trainer(folder: Path, world: World, name: str = "tied", sharded: bool = True) -> Trainer:
    encoder, precision = CASES[name].build(), Precision("fp32", CPU)
    weights = place_weights(encoder, world, precision, sharded=sharded)
    # Adam makes full updates of gradients that are rounding errors, unless eps is above these.
    adamw = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True)
    own_rates = {} if name == "lora" else {"backbone.model": 5e-4}
    return Trainer(
        step=exact_step(encoder, world, 2),
        optimizer=build_optimizer(encoder, adamw, 0.01, own_rates),
        schedule=LinearSchedule(0.1),
        settings=LoopSettings(
            STEPS, log_every=1, evaluate_every=2, checkpoint_every=1, clip_norm=0.5
        ),
        folder=folder,
        meter=ThroughputMeter(CPU, encoder.flops_per_token),
        # Some ranks encode more often than others, as they may in an evaluation.
        evaluate=lambda model: {"ndcg@10": activity(model, 1 + world.rank)},
        save_model=partial(save_encoder, **LENGTHS),
        averages=AveragedWeights(encoder, ExponentialAverage(0.5), STEPS),
        weights=weights,
    )


@torch.no_grad()
def activity(encoder: Encoder, times: int) -> float:
    for _ in range(times):
        sparse = encoder.encode(global_batch(99).documents, "document").sparse
    return float(sparse.sum())


class Log:
    """Keeps the records of a run."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def log(self, record: Any, step: int) -> None:
        self.records.append(dict(record))


class Left(NamedTuple):
    """What a training ends with."""

    weights: dict[str, Tensor]
    averages: dict[str, Tensor]
    records: list[dict[str, Any]]
    start: int


def train(
    world: World, folder: Path, until: int = STEPS, name: str = "tied", sharded: bool = True
) -> Left:
    trainer, log = make_trainer(folder, world, name, sharded), Log()
    start = trainer.resume()
    trainer.run((share(global_batch(step), world) for step in range(start, until)), [log])
    named = trainer.encoder.named_parameters()
    weights = {name: whole(value.detach()).clone() for name, value in named}
    averages = {name: whole(value).clone() for name, value in trainer.averages.state_dict().items()}
    return Left(weights, averages, log.records, start)


def assert_same(found: Left, expected: Left, tolerance: float) -> None:
    for kind in ("weights", "averages"):
        for name, value in getattr(expected, kind).items():
            difference = (getattr(found, kind)[name] - value).abs().max()
            assert difference <= tolerance, (kind, name)
    logged = expected.records[-len(found.records) :]
    for record, wanted in zip(found.records, logged, strict=True):
        for name in ("loss", "gradient_norm", "learning_rate", "dev_ndcg@10"):
            if name in wanted:
                assert record[name] == pytest.approx(wanted[name], rel=10 * tolerance), name


def model_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
def test_a_killed_training_goes_on_with_any_number_of_ranks(tmp_path):
    """Of adapters; tests/test_train_ranks.py has a training of all weights."""
    name, folder = "lora", tmp_path / "whole"
    expected = train(ALONE, folder, name=name, sharded=False)
    start = dict(CASES[name].build().named_parameters())
    moved = max((value - start[key]).abs().max() for key, value in expected.weights.items())
    assert moved > 1e-3  # beside which a tolerance of 1e-5 is small
    of_two = on_ranks(2, tmp_path / "two", train, tmp_path / "uninterrupted", STEPS, name)
    killed = tmp_path / "killed" / "checkpoints"
    on_ranks(2, tmp_path / "begun", train, killed.parent, 2, name)
    assert sorted(path.name for path in killed.iterdir()) == ["step-00000001", "step-00000002"]
    for size in (1, 2, 4):
        goes_on = tmp_path / f"on {size}"
        shutil.copytree(killed, goes_on / "checkpoints")
        if size == 1:
            resumed = [train(ALONE, goes_on, name=name)]
        else:
            resumed = on_ranks(size, tmp_path / f"{size}", train, goes_on, STEPS, name)
        for found in resumed:
            assert found.start == 2
            assert_same(found, expected, 1e-5)
            assert_same(found, of_two[0], 0.0 if size == 2 else 1e-5)
        saved, wanted = model_weights(goes_on), model_weights(folder)
        assert saved.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(saved[key], value, atol=1e-5, rtol=0)


def resume(world: World, folder: Path) -> tuple[int | None, str]:
    """Where a run goes on, and what is said of its checkpoints."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("sparton.training.state").addHandler(handler)
    try:
        return make_trainer(folder, world).resume(), " ".join(said)
    except CheckpointError as error:
        return None, str(error)


def unwritten(world: World, folder: Path) -> str:
    """What is said when one rank cannot write its part."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if world.rank == 1:
        FileSystemWriter.write_data = full
    try:
        train(world, folder)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_checkpoints_are_whole_or_passed_over(tmp_path):
    folder = tmp_path / "run"
    on_ranks(2, tmp_path / "a", train, folder, 3)
    kept = folder / "checkpoints"
    for message in on_ranks(2, tmp_path / "b", unwritten, folder):
        assert "step-00000004 could not be written" in message
        assert "it goes on from step-00000003. ([Errno 28] No space left on device)" in message
    assert sorted(path.name for path in kept.iterdir()) == ["step-00000002", "step-00000003"]
    part = next(kept.glob("step-00000003/__1_*.distcp"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    for start, said in on_ranks(2, tmp_path / "c", resume, folder):
        assert start == 2
        assert f"step-00000003 is damaged ({part.name} has another content than was wr" in said
    next(kept.glob("step-00000002/__0_*.distcp")).unlink()
    for start, said in on_ranks(2, tmp_path / "d", resume, folder):
        assert start is None and "none of the checkpoints in" in said
    (kept / "step-00000002" / "rest.pt").write_bytes(b"PK")
    shutil.rmtree(kept / "step-00000003")
    assert resume(ALONE, folder)[0] is None


@pytest.mark.parametrize("sharded", [True, False])
def test_a_training_goes_on_as_it_began(sharded, tmp_path):
    train(ALONE, tmp_path, 1, sharded=sharded)
    assert make_trainer(tmp_path, ALONE, sharded=sharded).resume() == 1
    began, now = ("", "not ") if sharded else ("not ", "")
    words = f"weights were {began}sharded, and here they are {now}to be: go on as it began"
    with pytest.raises(OtherRunError, match=words):
        make_trainer(tmp_path, ALONE, sharded=not sharded).resume()
