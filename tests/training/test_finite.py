"""What is not finite is named by the step at which it appears, however late that is seen."""

import json
import time

import pytest
import torch

from sparton.errors import NonFiniteLossError
from sparton.training import finite
from sparton.training.finite import FiniteWatch
from sparton.training.loop import LoopSettings
from sparton.training.state import load_checkpoint
from tests.training import test_loop
from tests.training.test_loop import Scaled, make_trainer, run, some_batch

RARELY = LoopSettings(20, log_every=100)
FINE, NAN, INF = (torch.tensor(number) for number in (1.0, float("nan"), float("inf")))


class Late:
    """An event of a device that is some steps behind its host, unless it is waited for."""

    step = 0  # of the host

    def __init__(self, lag: int) -> None:
        self.due = Late.step + lag

    def query(self) -> bool:
        return Late.step >= self.due

    def synchronize(self) -> None:
        pass


def poisoned(trainer, step: int, *, gradient: bool, value: float = float("nan")):
    """Batches, of which that of a step (from 1) has a loss or a gradient that is not finite."""

    def hurt(given: torch.Tensor) -> torch.Tensor:
        return given + value if Late.step == step else given

    if gradient:
        trainer.encoder.decoder.bias.register_hook(hurt)
    else:
        trainer.encoder.register_forward_hook(lambda *given: hurt(given[-1]))

    def batch(seed: int):
        Late.step = seed + 1
        return some_batch(seed)

    return batch


@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
@pytest.mark.parametrize("step", [1, 2, 7])
def test_the_step_is_named_and_is_the_last_between_two_log_lines(tmp_path, step, gradient):
    trainer = make_trainer(tmp_path)
    trainer.settings = RARELY
    batch = poisoned(trainer, step, gradient=gradient)
    what = "gradient" if gradient else "loss"
    with pytest.raises(NonFiniteLossError, match=f"the {what} was not finite at step {step};"):
        run(trainer, batches=batch)
    assert Late.step == step


@pytest.mark.parametrize("lag", [1, 3, 100])
@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
def test_what_arrives_late_names_its_step_and_not_a_later_one(tmp_path, monkeypatch, gradient, lag):
    """Everything after it is not finite either."""
    monkeypatch.setattr(finite, "_arrival", lambda numbers: Late(lag))
    trainer = make_trainer(tmp_path)
    trainer.settings = RARELY
    with pytest.raises(NonFiniteLossError, match="not finite at step 7;"):
        run(trainer, until=20, batches=poisoned(trainer, 7, gradient=gradient))
    assert Late.step == 7 + min(lag, finite._LATEST)


def test_nothing_is_saved_or_logged_before_the_late_numbers_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(finite, "_arrival", lambda numbers: Late(3))
    trainer = make_trainer(tmp_path, evaluate=lambda encoder: {"ndcg@10": float(len(saved))})
    trainer.settings = LoopSettings(20, log_every=7, evaluate_every=2, checkpoint_every=2)
    saved = []
    trainer.save_model = lambda encoder, path: saved.append(encoder.decoder.bias.isfinite().all())
    with pytest.raises(NonFiniteLossError, match="not finite at step 8;"):
        run(trainer, until=20, batches=poisoned(trainer, 8, gradient=False))
    assert len(saved) == 3 and all(saved)
    assert load_checkpoint(tmp_path / "checkpoints")["step"] == 6
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4, 6, 7]


def test_overflows_under_a_loss_scale_are_skipped_and_a_loss_that_is_nan_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(test_loop, "Precision", Scaled)
    trainer = make_trainer(tmp_path)
    batch = poisoned(trainer, 5, gradient=True, value=float("inf"))
    run(trainer, batches=batch)
    assert load_checkpoint(tmp_path / "checkpoints")["step"] == test_loop.STEPS
    other = make_trainer(tmp_path / "other")
    with pytest.raises(NonFiniteLossError, match="the loss was not finite at step 5;"):
        run(other, batches=poisoned(other, 5, gradient=False))


def test_a_loss_scale_that_never_fits_ends_the_run():
    watch = FiniteWatch(torch.nn.Linear(1, 1), "checkpoints", scaled=True)

    def skip(first: int, last: int) -> None:
        for step in range(first, last + 1):
            watch.note(step, FINE, NAN if step % 2 else INF)
            watch.check(step, wait=False, saving=False)

    skip(1, 40)
    watch.note(41, FINE, FINE)
    skip(42, 81)
    with pytest.raises(
        NonFiniteLossError, match="gradient was not finite at step 82 nor at the 40 before it;"
    ):
        skip(82, 82)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_host_that_is_ahead_of_its_device_does_not_wait():
    watch = FiniteWatch(torch.nn.Linear(1, 1), "checkpoints", scaled=False)
    loss, norm = torch.ones(2, device="cuda").unbind()

    def watched() -> None:
        for step in range(finite._LATEST):
            watch.note(step, loss, norm)
            watch.check(step, wait=False, saving=False)

    def seconds(work) -> float:
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)  # half a second
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    watched()  # what is allocated once
    watch.check(0, wait=True, saving=False)
    each = seconds(watched) / finite._LATEST
    assert each < 1e-4 < 0.1 < seconds(loss.item), "0.5 % of a step of 20 ms"
