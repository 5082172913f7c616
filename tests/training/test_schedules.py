"""Learning rates, precision and throughput: small pure pieces of the loop."""

import json
import subprocess
from itertools import pairwise

import pytest
import torch

from sparton.training import manifest, throughput
from sparton.training.precision import Precision
from sparton.training.schedules import ConstantSchedule, CosineSchedule, LinearSchedule
from sparton.training.throughput import ThroughputMeter
from tests.training.bag_encoder import random_batch

CPU = torch.device("cpu")


@pytest.mark.parametrize("schedule", [LinearSchedule(0.1), CosineSchedule(0.1)])
def test_rates_rise_to_the_base_and_fall_to_the_end(schedule):
    rates = [schedule(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) in (9, 10)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[-1] < 0.02


def test_a_final_rate_is_kept():
    assert LinearSchedule(0.0, final=0.5)(99, 100) == pytest.approx(0.505)
    assert CosineSchedule(0.0, final=0.5)(10**6, 10**6) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", [LinearSchedule, CosineSchedule])
@pytest.mark.parametrize("final", [-0.1, 1.1, float("nan")])
def test_a_final_rate_that_is_no_share_of_the_base_is_refused(kind, final):
    with pytest.raises(ValueError, match=rf"final={final} must be a share of the base rate"):
        kind(final=final)


def test_constant_only_warms_up():
    assert [ConstantSchedule(0.5)(step, 4) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "parameters", "compute"),
    [
        ("fp32", None, torch.float32),
        ("bf16", None, torch.bfloat16),
        ("bf16_pure", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precisions(name, parameters, compute):
    precision = Precision(name, CPU)
    assert precision.parameter_dtype == parameters
    with precision.autocast():
        weight = torch.ones(2, 2, dtype=parameters or torch.float32)
        assert (weight @ weight).dtype == compute
    assert not precision.grad_scaler().is_enabled()


def test_unknown_precisions_and_fp16_on_a_cpu_are_refused():
    with pytest.raises(ValueError, match="precision='fp4' must be fp32, bf16"):
        Precision("fp4", CPU)
    with pytest.raises(
        ValueError, match=r"precision=fp8 needs .* 8\.9 or later .* got a CPU; use bf16"
    ):
        Precision("fp8", CPU)
    with pytest.raises(ValueError, match="precision=fp16 needs a CUDA GPU"):
        Precision("fp16", CPU)


def test_the_meter_counts_what_passed_since_the_last_reading(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    meter = ThroughputMeter(CPU, lambda length, side: 1.0, world_size=2)
    meter.restart()
    batch = random_batch(4, 1, seed=0)
    tokens = batch.queries.num_tokens + batch.documents.num_tokens
    meter.count(batch, waited=0.5)
    meter.count(batch, waited=0.5)
    now = 2.0
    first = meter.read()
    now = 6.0
    assert first["examples_per_second"] == pytest.approx(2 * 8 / 2)
    assert first["tokens_per_second"] == pytest.approx(2 * 2 * tokens / 2)
    assert (first["step_ms"], first["data_wait_ms"]) == (1000, 500)
    assert meter.read()["examples_per_second"] == 0
    meter.count(batch, waited=0.0)
    with meter.paused():
        now = 100.0
    now = 101.0
    assert meter.read()["step_ms"] == 1000


def test_utilization_counts_each_side_by_itself(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(throughput, "peak_flops", lambda device: 1000.0)
    meter = ThroughputMeter(CPU, lambda length, side: length if side == "document" else 0.5)
    meter.restart()
    batches = [random_batch(4, 1, seed=seed) for seed in range(2)]
    for batch in batches:
        meter.count(batch, waited=0.0)
    now = 2.0
    queries = sum(batch.queries.num_tokens for batch in batches)
    documents = sum(batch.documents.num_tokens for batch in batches)
    flops = 0.5 * queries + documents * documents / 16
    assert meter.read()["mfu"] == pytest.approx(flops / 2 / 1000)
    now = 4.0
    assert meter.read()["mfu"] == 0


def test_the_manifest_is_json_and_survives_a_machine_without_git(monkeypatch):
    json.dumps(manifest.describe_environment())

    def missing(*arguments, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert manifest.describe_environment()["git"] is None


def test_the_manifest_does_without_a_command_that_does_not_end(monkeypatch):
    monkeypatch.setattr(manifest, "_PATIENCE", 0.1)
    assert manifest._output("sleep", "5") is None  # of one that ends it would be ""


def test_a_copy_of_the_code_says_of_which_commit(monkeypatch):
    monkeypatch.setenv("SPARTON_COMMIT", "0123abc")
    assert manifest.describe_environment()["git"] == {"sha": "0123abc", "dirty": None}


def test_a_tree_that_cannot_be_asked_is_not_called_clean(monkeypatch):
    answers = {"rev-parse": "abc", "status": None}
    monkeypatch.setattr(manifest, "_output", lambda *command: answers.get(command[4]))
    assert manifest._git_state() == {"sha": "abc", "dirty": None}
    answers["status"] = ""
    assert manifest._git_state() == {"sha": "abc", "dirty": False}
