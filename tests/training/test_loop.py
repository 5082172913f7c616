"""The loop: what it logs, keeps and refuses, and that a killed run ends where a whole one does."""

import errno
import io
import json
import logging
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparton.errors import CheckpointError, NonFiniteLossError
from sparton.losses.objective import Objective
from sparton.losses.ramps import QuadraticRamp
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, flops
from sparton.training.averaging import AveragedWeights, ExponentialAverage
from sparton.training.distributed import World
from sparton.training.loggers import JsonlLogger
from sparton.training.loop import LoopSettings, Trainer
from sparton.training.micro_batch import MicroBatchSearch
from sparton.training.optimization import build_optimizer, update
from sparton.training.precision import Precision
from sparton.training.schedules import CosineSchedule
from sparton.training.state import load_checkpoint, save_checkpoint
from sparton.training.step import ExactStep
from sparton.training.throughput import ThroughputMeter
from sparton.types import TrainBatch
from tests.training.bag_encoder import BagEncoder, random_batch

STEPS = 12
CPU = torch.device("cpu")


SCHEDULE = CosineSchedule(0.2)


def make_trainer(folder: Path, schedule=SCHEDULE, evaluate=None, found=None) -> Trainer:
    encoder = BagEncoder(dropout=0.3)
    objective = Objective(InfoNCE(), {}, {"flops": Regularizer(flops, 0.1, QuadraticRamp(8))})
    step = ExactStep(encoder, objective, World(0, 1, CPU), Precision("fp32", CPU), seed=5)
    adamw = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    trainer = Trainer(
        step=step,
        optimizer=build_optimizer(encoder, adamw, weight_decay=0.01),
        schedule=schedule,
        settings=LoopSettings(STEPS, log_every=1, evaluate_every=3, checkpoint_every=2),
        folder=folder,
        meter=ThroughputMeter(CPU, lambda length, side: 0.0),
        evaluate=evaluate or (lambda encoder: {"ndcg@10": encoder.decoder.weight.sum().item()}),
        save_model=lambda encoder, path: torch.save(encoder.state_dict(), path.with_suffix(".pt")),
    )
    if found is not None:
        trainer.fit = Found(step, trainer.optimizer, 8, 8)
        trainer.fit.size = found
    folder.mkdir(parents=True, exist_ok=True)
    trainer.resume()
    return trainer


def some_batch(seed: int) -> TrainBatch:
    return random_batch(6, 1, seed)


def run(trainer: Trainer, until: int = STEPS, batches=some_batch) -> None:
    logger = JsonlLogger(trainer.folder / "metrics.jsonl", trainer.start_step)
    trainer.run((batches(seed=step) for step in range(trainer.start_step, until)), [logger])


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(record: dict) -> dict:
    timed = ("examples_per_second", "tokens_per_second", "step_ms", "data_wait_ms")
    return {key: value for key, value in record.items() if key not in timed}


@pytest.mark.parametrize("killed_at", [1, 5, 6, 11])
def test_killed_run_ends_bit_identical_to_an_uninterrupted_one(tmp_path, killed_at):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    reference = make_trainer(whole)
    run(reference)
    run(make_trainer(killed), until=killed_at)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # the kill came in the middle of a line
    resumed = make_trainer(killed)
    assert resumed.start_step == killed_at - killed_at % 2
    run(resumed)
    for name, value in reference.encoder.state_dict().items():
        assert torch.equal(value, resumed.encoder.state_dict()[name]), name
    assert [without_times(r) for r in records(killed)] == [without_times(r) for r in records(whole)]
    assert resumed.best == reference.best


class Found(MicroBatchSearch):
    """Finds another micro-batch than a run that goes on would, on a GPU that there need not be."""

    size = 2

    def __call__(self, batch: TrainBatch) -> None:
        self.choice = self.choice or {"micro_batch": self.size}
        self.step.micro_batch = self.choice["micro_batch"]


def test_a_micro_batch_that_was_found_is_kept(tmp_path):
    """It decides the dropout: the rest of a run with another would differ in its last bits."""
    losses = []
    for name, sizes in (("whole", [2]), ("killed", [2, 3]), ("another", [3])):
        for until, size in zip([6, STEPS][-len(sizes) :], sizes, strict=True):
            trainer = make_trainer(tmp_path / name, found=size)
            run(trainer, until=until)
        losses.append(records(tmp_path / name)[-1]["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_the_first_step_of_a_run_and_of_its_rest_is_logged_however_rarely_others_are(tmp_path):
    for until in (4, STEPS):
        trainer = make_trainer(tmp_path)
        trainer.settings = replace(trainer.settings, log_every=8, evaluate_every=None)
        run(trainer, until=until)
    assert [record["step"] for record in records(tmp_path)] == [1, 5, 8, 12]


def averaged(folder: Path) -> Trainer:
    """Whose averages are of the weights of the first step or of its checkpoint, as in a run."""
    trainer = make_trainer(folder)
    trainer.averages = AveragedWeights(trainer.encoder, ExponentialAverage(0.8), STEPS)
    trainer.resume()
    return trainer


def test_averages_are_evaluated_and_saved_and_survive_a_kill(tmp_path):
    whole, killed, raw = (tmp_path / name for name in ("whole", "killed", "raw"))
    reference, without = averaged(whole), make_trainer(raw)
    run(reference)
    run(without)
    run(averaged(killed), until=7)
    resumed = averaged(killed)
    assert resumed.start_step == 6
    run(resumed)
    expected = reference.averages.state_dict()
    for name, value in resumed.averages.state_dict().items():
        assert torch.equal(value, expected[name]), name
        assert torch.equal(without.encoder.state_dict()[name], reference.encoder.state_dict()[name])
    assert [without_times(r) for r in records(killed)] == [without_times(r) for r in records(whole)]
    figures = [records(folder)[-1]["dev_ndcg@10"] for folder in (whole, raw)]
    assert figures[0] == pytest.approx(expected["decoder.weight"].sum().item())
    assert figures[1] != pytest.approx(figures[0])
    saved = torch.load(whole / "model.pt")
    assert not torch.equal(saved["decoder.weight"], torch.load(raw / "model.pt")["decoder.weight"])
    forgetful = averaged(tmp_path / "forgetful")
    run(forgetful, until=7)
    forgetful = make_trainer(tmp_path / "forgetful")
    forgetful.averages = AveragedWeights(forgetful.encoder, ExponentialAverage(0.8), STEPS)
    run(forgetful)
    assert not torch.equal(
        forgetful.averages.state_dict()["decoder.weight"], expected["decoder.weight"]
    )


def test_resuming_without_the_schedule_would_be_seen(tmp_path):
    """Negative control of the test above: a schedule that restarts gives other weights."""
    run(make_trainer(tmp_path / "whole"))
    run(make_trainer(tmp_path / "killed"), until=6)
    restarted = make_trainer(
        tmp_path / "killed", schedule=lambda step, steps: SCHEDULE(step - 6, steps)
    )
    run(restarted)
    last = [records(tmp_path / name)[-1]["loss"] for name in ("whole", "killed")]
    assert last[0] != last[1]


class Scaled(Precision):
    """fp32 with the loss scaling of fp16, which doubles every third step."""

    def grad_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


@pytest.mark.parametrize("forgets", [False, True], ids=["", "negative_control"])
def test_a_killed_run_goes_on_with_its_loss_scale(tmp_path, forgets, monkeypatch):
    monkeypatch.setattr("tests.training.test_loop.Precision", Scaled)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    reference = make_trainer(whole)
    run(reference)
    run(make_trainer(killed), until=8)
    if forgets:
        monkeypatch.setattr(torch.amp.GradScaler, "load_state_dict", lambda *_: None)
    resumed = make_trainer(killed)
    run(resumed)
    assert reference.scaler.get_scale() == 8.0 * 2 ** (STEPS // 3)
    assert (resumed.scaler.state_dict() == reference.scaler.state_dict()) is not forgets
    for name, value in reference.encoder.state_dict().items():
        assert torch.equal(value, resumed.encoder.state_dict()[name]), name


def test_records_hold_every_part_of_the_step(tmp_path):
    run(make_trainer(tmp_path))
    first, third = records(tmp_path)[0], records(tmp_path)[2]
    expected = {
        "loss", "loss_ranking", "loss_document_flops", "lambda_d_flops", "gradient_norm",
        "learning_rate", "examples_per_second", "tokens_per_second", "step_ms",
        "query_active_terms", "document_active_terms", "document_cosine", "document_dead_rows",
    }  # fmt: skip
    assert expected <= set(first)
    assert "dev_ndcg@10" in third and "dev_ndcg@10" not in first
    assert third["lambda_d_flops"] == pytest.approx(0.1 * (2 / 8) ** 2)


def test_the_loss_falls(tmp_path):
    trainer = make_trainer(tmp_path)
    run(trainer, batches=lambda seed: random_batch(6, 1, seed=0))
    losses = [record["loss_ranking"] for record in records(tmp_path)]
    assert losses[-1] < losses[0]


def test_the_best_model_is_kept_not_the_last(tmp_path):
    scores = iter([0.1, 0.9, 0.2, 0.3])
    trainer = make_trainer(tmp_path, evaluate=lambda encoder: {"ndcg@10": next(scores)})
    weights = {}
    trainer.save_model = lambda encoder, path: weights.update(
        {trainer.best: encoder.decoder.weight.clone()}
    )
    run(trainer)
    assert trainer.best == 0.9
    assert list(weights) == [0.1, 0.9]


def test_a_model_that_was_deleted_is_there_again_after_the_same_command(tmp_path, caplog):
    """The best one, if it was that of the last checkpoint."""
    whole = make_trainer(tmp_path, evaluate=lambda encoder: {"ndcg@10": 0.5})
    run(whole)
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    again = make_trainer(tmp_path, evaluate=lambda encoder: {"ndcg@10": 0.25})
    saved = []
    again.save_model = lambda encoder, folder: saved.append(folder)
    run(again)
    assert saved == [tmp_path / "model"]
    assert "step 12 takes its place with 0.2500" in caplog.text and "=0.5000" in caplog.text
    weights = tmp_path / "model" / "half" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    save_file({"weight": torch.ones(3)}, weights)
    run(make_trainer(tmp_path, evaluate=lambda encoder: pytest.fail("it is there")))
    weights.write_bytes(weights.read_bytes()[:20])
    damaged = make_trainer(tmp_path, evaluate=lambda encoder: {"ndcg@10": 0.25})
    damaged.save_model = lambda encoder, folder: saved.append(folder)
    run(damaged)
    assert len(saved) == 2 and "model is damaged, and was the best model" in caplog.text


def test_of_equally_good_models_the_first_is_kept(tmp_path):
    scores = iter([0.1, 0.9, 0.9, 0.9])
    trainer = make_trainer(tmp_path, evaluate=lambda encoder: {"ndcg@10": next(scores)})
    saved = []
    trainer.save_model = lambda encoder, path: saved.append(trainer.best)
    run(trainer)
    assert saved == [0.1, 0.9]


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoints(tmp_path):
    trainer = make_trainer(tmp_path)

    def poisoned(seed: int):
        if seed == 7:
            with torch.no_grad():
                trainer.encoder.decoder.bias[0] = float("nan")
        return random_batch(6, 1, seed)

    with pytest.raises(
        NonFiniteLossError, match=r"the loss was not finite at step 8;.*smaller learning rate"
    ):
        run(trainer, batches=poisoned)
    state = load_checkpoint(tmp_path / "checkpoints")
    assert state["step"] == 6
    assert all(value.isfinite().all() for value in state["encoder"].values())


def test_a_gradient_that_is_not_finite_is_noticed_before_anything_is_saved(tmp_path):
    trainer = make_trainer(tmp_path)
    poison = {6: float("nan")}
    trainer.encoder.decoder.bias.register_hook(lambda g: g + poison.get(trainer.at, 0.0))

    def noting(seed: int):
        trainer.at = seed
        return random_batch(6, 1, seed)

    saved = []
    trainer.save_model = lambda encoder, path: saved.append(encoder.decoder.bias.isfinite().all())
    with pytest.raises(NonFiniteLossError, match="the gradient was not finite at step 7"):
        run(trainer, batches=noting)
    assert all(saved)
    assert load_checkpoint(tmp_path / "checkpoints")["step"] == 6


def test_weights_that_overflow_in_the_last_update_are_not_saved(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.schedule = lambda step, steps: 1e38 if step == 5 else 1.0
    with pytest.raises(NonFiniteLossError, match="a weight was not finite after step 6"):
        run(trainer)
    assert load_checkpoint(tmp_path / "checkpoints")["step"] == 4


def test_a_checkpoint_of_other_settings_is_refused_with_their_names(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.identity = {"batch": "6", "data.path": "a", "head": "eager"}
    run(trainer, until=4)
    other = make_trainer(tmp_path / "elsewhere")
    other.folder, other.identity = tmp_path, {"batch": "6", "data.path": "b"}
    message = r"data.path=b \(was a\), head=absent \(was eager\)\. Give this run a folder"
    with pytest.raises(CheckpointError, match=message):
        other.resume()
    other.identity = trainer.identity
    assert other.resume() == 4


def test_the_gradient_is_clipped_and_vectors_do_not_decay(tmp_path):
    trainer = make_trainer(tmp_path)
    decays = {id(p): g["weight_decay"] for g in trainer.optimizer.param_groups for p in g["params"]}
    assert decays[id(trainer.encoder.decoder.weight)] == 0.01
    assert decays[id(trainer.encoder.decoder.bias)] == 0.0
    for limit in (1e-3, None):
        sgd = torch.optim.SGD(trainer.encoder.parameters(), lr=1.0)
        sgd.param_groups[0]["base_lr"] = 1.0
        before = trainer.encoder.decoder.weight.clone()
        trainer.step(random_batch(6, 1, seed=0), 0)
        norm = update(sgd, trainer.scaler, 1.0, limit)
        moved = (trainer.encoder.decoder.weight - before).norm()
        assert (moved <= 1e-3) == (limit is not None)
        assert norm > 1e-2


def test_a_checkpoint_cut_in_half_is_passed_over(tmp_path, caplog):
    run(make_trainer(tmp_path))
    newest = sorted((tmp_path / "checkpoints").glob("*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with caplog.at_level(logging.WARNING):
        assert load_checkpoint(tmp_path / "checkpoints")["step"] == STEPS - 2
    assert newest.name in caplog.text


def test_no_byte_of_a_checkpoint_turns_into_other_weights(tmp_path, caplog):
    """torch.load would take them: it looks at no checksum."""
    save_checkpoint(tmp_path, 1, {"weight": torch.zeros(300)})
    newest = save_checkpoint(tmp_path, 2, {"weight": torch.arange(300.0)})
    good, silent = newest.read_bytes(), 0
    for place in range(0, len(good), 7):
        newest.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
        state = load_checkpoint(tmp_path)
        assert state["step"] == 1 or torch.equal(state["weight"], torch.arange(300.0)), place
        with suppress(Exception):
            trusted = torch.load(newest, weights_only=True)["weight"]
            silent += not torch.equal(trusted, torch.arange(300.0))
    assert silent > 100, "so many would have gone unseen"
    assert f"the checkpoint {newest} is damaged" in caplog.text and "trying an" in caplog.text


@pytest.mark.parametrize(
    ("state", "why"),
    [({"step": 2}, r"it has no weight"), ({"step": 3, "weight": 1}, "it is that of step 3")],
)
def test_a_checkpoint_of_another_content_is_passed_over(tmp_path, caplog, state, why):
    save_checkpoint(tmp_path, 1, {"weight": 7})
    torch.save(state, tmp_path / "step-00000002.pt")
    assert load_checkpoint(tmp_path, ["weight"]) == {"step": 1, "weight": 7}
    assert f"step-00000002.pt is damaged ({why})" in caplog.text


def test_only_damaged_checkpoints_are_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "step-00000004.pt").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"step-00000004\.pt.*Delete the folder"):
        load_checkpoint(tmp_path)


class InterruptedFile(io.BytesIO):
    def write(self, data):
        if self.tell():
            raise KeyboardInterrupt
        return super().write(data)


def test_an_interrupt_while_a_checkpoint_is_written_stays_one(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 2, {"weight": torch.ones(3)})
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda state, _: save(state, InterruptedFile()))
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 4, {"weight": torch.ones(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.pt"]


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 2, {"weight": torch.ones(3)})

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    message = r"could not be written.*Make room.*from step-00000002\.pt.*No space left"
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, 4, {"weight": torch.zeros(3)})

    def limited(*arguments):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(torch, "save", limited)
    with pytest.raises(
        CheckpointError, match=r"may not be so large here. Raise that limit .*ulimit"
    ):
        save_checkpoint(tmp_path, 4, {"weight": torch.zeros(3)})
    assert load_checkpoint(tmp_path)["step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002.pt"]


@pytest.mark.parametrize("other", [2, 12])
def test_ranks_that_read_other_checkpoints_are_refused(tmp_path, monkeypatch, other):
    """As of folders that are not shared, or of a disk that fails one rank."""
    run(make_trainer(tmp_path))
    trainer = make_trainer(tmp_path)
    both = lambda self, own: max(own, other if own > 0 else -other)  # noqa: E731
    monkeypatch.setattr(World, "largest", both)
    if other == STEPS:
        assert trainer.resume() == STEPS
    else:
        with pytest.raises(CheckpointError, match="of step 12 and another one that of step"):
            trainer.resume()


def test_a_dev_metric_that_is_no_number_is_told(tmp_path, caplog):
    trainer = make_trainer(tmp_path, evaluate=lambda encoder: {"ndcg@10": float("nan")})
    run(trainer)
    assert "ndcg@10 of the dev tasks is no number" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [{"steps": 0}, {"log_every": 0}, {"checkpoint_every": -3}, {"clip_norm": 0.0}],
)
def test_plans_that_are_none_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        LoopSettings(**{"steps": 4} | settings)


def test_two_checkpoints_are_kept(tmp_path):
    run(make_trainer(tmp_path))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000010.pt", "step-00000012.pt"]
