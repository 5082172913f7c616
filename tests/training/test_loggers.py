"""What the screen shows of a run, and what other loggers ask for."""

import io
import json
import sys

import pytest
import torch
from rich.console import Console

from sparton.training.loggers import (
    JsonlLogger,
    ScreenLogger,
    read_log,
    tensorboard_logger,
    wandb_logger,
)
from sparton.training.profiling import profile_logger
from tests.models.test_splade_folder import largest_file


def shown(record: dict[str, float], step: int, first: bool = False) -> str:
    file = io.StringIO()
    logger = ScreenLogger(Console(file=file, width=200), steps=90)
    if not first:
        logger.log({}, 1)
    logger.log(record, step)
    return file.getvalue().splitlines(keepends=True)[-1]


def test_the_time_left_is_that_of_the_steps_left_but_for_the_first_line():
    assert "left" not in shown({"loss": 0.5, "step_ms": 1500.0}, 10, first=True)
    line = shown({"loss": 0.5, "step_ms": 1500.0}, 10)
    assert line == "10/90  loss 0.5000  ms 1,500  left 0:02:00\n"
    assert "left" not in shown({"step_ms": 1500.0}, 90)
    assert "left" not in shown({"dev_ndcg@10": 0.5}, 10)


def test_a_line_that_is_no_record_stops_no_run_and_does_not_stay(tmp_path, caplog):
    file = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1, "loss": 1.0}', "\0\0", '["step"]', '{"step": "2"}', "[" * 9999]
    file.write_bytes("\n".join([*lines, '{"step": 2}', '{"step": 3}', '{"ste']).encode() + b"\xff")
    logger = JsonlLogger(file, start_step=2)
    logger.log({"loss": 0.5}, 3)
    logger.close()
    records = [{"step": 1, "loss": 1.0}, {"step": 2}, {"step": 3, "loss": 0.5}]
    assert [json.loads(line) for line in file.read_text().splitlines()] == records
    assert [f"line {n}: no record" in caplog.text for n in range(1, 7)] == [
        False,
        *[True] * 4,
        False,
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_costs_lines_and_no_run(tmp_path, caplog):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    with largest_file(40):
        for step in (1, 2, 3):
            logger.log({"loss": 0.5}, step)
        logger.close()
    assert [record["step"] for record in read_log(tmp_path / "metrics.jsonl")] == [1]
    assert "step 2 is cut short" in caplog.text and "step 3 is missing" in caplog.text


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """The package on a machine where nobody has logged in."""
    package = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # nobody to ask, whoever runs the tests
    package.teardown()
    yield package
    package.teardown()


@pytest.mark.parametrize("mode", [None, "online"])
def test_without_an_account_wandb_is_refused_in_one_sentence(wandb, tmp_path, mode):
    with pytest.raises(ValueError, match=r"^Weights & Biases .* set WANDB_API_KEY, run") as caught:
        wandb_logger(f"{tmp_path}", "sparton", mode)
    assert "\n" not in str(caught.value)


def test_a_run_that_wandb_does_not_begin_is_told_in_one_sentence(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    open_logger = wandb_logger(f"{tmp_path}", "sparton", "online")
    with pytest.raises(ValueError, match=r"^Weights & Biases .* set WANDB_API_KEY, run"):
        open_logger(start_step=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "variable"), [("offline", ""), ("disabled", ""), (None, "offline")]
)
def test_modes_without_an_account_need_none(wandb, tmp_path, monkeypatch, mode, variable):
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    logger = wandb_logger(f"{tmp_path}", "sparton", mode)(start_step=0)
    logger.log({"loss": 0.5}, 1)
    logger.close()
    assert bool(list(tmp_path.glob("wandb/offline-run-*"))) == (mode != "disabled")


def test_packages_that_are_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="Weights & Biases needs the package wandb: pip install"):
        wandb_logger(f"{tmp_path}", "sparton")
    with pytest.raises(ValueError, match="TensorBoard is a package of its own: pip install"):
        tensorboard_logger(f"{tmp_path}")


def test_a_profile_is_of_the_steps_of_one_window(tmp_path):
    logger = profile_logger(f"{tmp_path}")(start_step=0)
    a = torch.randn(64, 64)
    for step in range(1, 13):
        a.exp() if 5 <= step <= 8 else a.cos()  # the window's steps do something else
        if 5 <= step <= 8:
            a @ a
        if step == 1 or step % 4 == 0:
            logger.log({"loss": 0.5}, step)
    logger.close()
    found = json.loads((tmp_path / "profile.json").read_text())
    assert (found["first_step"], found["steps"]) == (5, 4)
    calls = {kernel["name"]: kernel["calls"] for kernel in found["kernels"]}
    assert calls["aten::exp"] == calls["aten::mm"] == 1 and "aten::cos" not in calls
    times = [kernel["ms"] for kernel in found["kernels"]]
    assert times == sorted(times, reverse=True) and 0 < sum(times) <= found["step_ms"]


def test_a_profile_is_of_no_evaluation(tmp_path):
    logger = profile_logger(f"{tmp_path}")(start_step=0)
    a = torch.randn(64, 64)
    for step in range(1, 7):
        a.exp()
        if step in (3, 4):
            a.cos()  # of an evaluation
        logger.log({"loss": 0.5} | ({"dev_ndcg@10": 0.5} if step in (3, 4) else {}), step)
    logger.close()
    found = json.loads((tmp_path / "profile.json").read_text())
    assert (found["first_step"], found["steps"]) == (5, 1)
    calls = {kernel["name"]: kernel["calls"] for kernel in found["kernels"]}
    assert calls["aten::exp"] == 1 and "aten::cos" not in calls


def test_a_run_that_is_too_short_for_a_profile_says_so(tmp_path, caplog):
    logger = profile_logger(f"{tmp_path}")(start_step=0)
    for step in (1, 50):
        logger.log({"loss": 0.5}, step)
    logger.close()
    assert "no profile.json: it needs 3 lines of the log" in caplog.text
    assert not list(tmp_path.iterdir())
