"""The benchmark's gate on winning tokens: what it lets through and what it must not."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch

from sparton.kernels.splade_head.cpu import splade_head_forward_cpu
from sparton.types import TokenBatch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/benchmark_head.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_head", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checked(benchmark):
    """Problem, reps and argmax, in which about half of the entries are active."""
    generator = torch.Generator().manual_seed(0)
    tokens = TokenBatch.from_lists([[1] * n for n in (5, 9, 1, 20)])
    hidden = torch.randn(35, 16, generator=generator)
    weight = torch.randn(500, 16, generator=generator) / 4
    bias = torch.full((500,), -1.5)
    reps, argmax = splade_head_forward_cpu(hidden, weight, bias, tokens.cu_seqlens)
    assert 0.2 < (reps > 0).float().mean() < 0.8
    return benchmark.Problem(hidden, weight, bias, tokens, reps), reps, argmax


def test_entries_of_zero_may_lack_a_winner(benchmark, checked):
    problem, reps, argmax = checked
    for winners in (argmax, argmax.where(reps > 0, -1)):
        outside, difference = benchmark.winner_errors(problem, reps, winners)
        assert outside == 0
        assert difference < 1e-5


def test_wrong_winners_are_noticed(benchmark, checked):
    problem, reps, argmax = checked
    missing = argmax.clone()
    missing[reps > 0] = -1
    for winners in (missing, argmax + 20, argmax - 2**20, torch.full_like(argmax, -2)):
        assert benchmark.winner_errors(problem, reps, winners)[0] > 0
    last = (problem.tokens.cu_seqlens[1:, None] - 1).expand_as(argmax)
    outside, difference = benchmark.winner_errors(problem, reps, last)
    assert outside == 0
    assert difference > 1e-2


def test_times_only_within_the_allowed_errors(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "measure", lambda run: {"p50_ms": run()})
    assert benchmark.gated([1e-4, 0], [1e-4, 0], lambda: 2.0)["p50_ms"] == 2.0
    for found in ([2e-4, 0], [1e-4, 1], [float("nan"), 0]):
        record = benchmark.gated(found, [1e-4, 0], lambda: 2.0)
        assert record["status"] == "red_gate"
        assert "p50_ms" not in record


@pytest.mark.parametrize("fault", [FileNotFoundError(), subprocess.CalledProcessError(128, "git")])
def test_environment_without_git(benchmark, monkeypatch, fault):
    def fail(*args, **kwargs):
        raise fault

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    clean = benchmark.environment()
    monkeypatch.setattr(subprocess, "run", fail)
    record = benchmark.environment()
    assert record["git_sha"] is record["dirty"] is record["driver"] is None
    assert clean.keys() == record.keys()
