"""The attention benchmark in miniature: on a GPU, or in Triton's interpreter."""

import json
import sys

import pytest
import torch

import benchmark_attention
from attention_benchmark import problems, providers, tuning
from attention_benchmark.problems import BOTH, FORWARD, SHAPES
from sparton.kernels.varlen_attention.tiles import Tiling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OWN = ("sparton", "sdpa_efficient")


def records(tmp_path, monkeypatch, *words: str) -> list[dict]:
    output = tmp_path / "attention.jsonl"
    fixed = ("--device", DEVICE, "--miniature", "--seconds", "0.001", "--output", str(output))
    monkeypatch.setattr(sys, "argv", ["benchmark_attention.py", *fixed, *words])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    benchmark_attention.main()
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_records(tmp_path, monkeypatch, capsys):
    words = ("--shapes", "queries", "--providers", *OWN)
    for _ in range(2):  # measured again, a shape replaces its records
        found = records(tmp_path, monkeypatch, *words)
        assert [(r["mode"], r["provider"]) for r in found] == [
            (mode, provider) for mode in (FORWARD, BOTH) for provider in OWN
        ]
    for record in found:
        assert record["status"] == "ok", record
        assert 0 < record["p20_ms"] <= record["p50_ms"] <= record["p80_ms"]
        assert record["memory_floor_ms"] > 0
        assert record["errors"]["norm"] < 0.005
    assert "queries forward sparton" in capsys.readouterr().out
    tuned = records(tmp_path, monkeypatch, "--shapes", "queries", "--tune")[len(found) :]
    assert [r["mode"] for r in tuned] == [
        "forward", "forward", *["backward queries"] * 2, *["backward keys"] * 2
    ]  # fmt: skip
    assert all(r["status"] == "ok" and "Tiling" in r["tiling"] for r in tuned)


@pytest.mark.parametrize("provider", OWN)
@pytest.mark.parametrize("name", ["documents", "queries_documents"])
def test_providers_agree_with_truth(name, provider):
    problem = problems.make_problem(SHAPES[name].shrunk(), DEVICE)
    expected = problems.truth(problem)
    tried = providers.attempt(provider, problem)
    assert problems.passes(problems.errors(tried.results(BOTH), expected))
    assert problems.passes(problems.errors(tried.results(FORWARD), expected))


def test_wrong_results_get_no_time():
    problem = problems.make_problem(SHAPES["documents"].shrunk(), DEVICE)
    right = problems.truth(problem)
    assert problems.passes(problems.errors(right, right))
    rows = len(right[0])
    for place in range(4):
        wrong = [x.clone() for x in right]
        wrong[place] *= 1.02
        assert not problems.passes(problems.errors(wrong, right)), "too large"
        wrong[place] = right[place].clone()
        wrong[place][rows // 2] = 0
        assert not problems.passes(problems.errors(wrong, right)), "a token left out"
        wrong[place][rows // 2, 0, 0] = float("nan")
        assert not problems.passes(problems.errors(wrong, right)), "not a number"


def tuned(problem):
    return list(tuning.tune(problem, problems.truth(problem), DEVICE, 0.001, True))


def test_what_fails_is_a_row(monkeypatch):
    def refusing(*args):
        raise RuntimeError("no kernel\nand much more")

    monkeypatch.setattr(tuning, "measure", refusing)
    tried = tuned(problems.make_problem(SHAPES["queries"].shrunk(), DEVICE))
    assert tried[0][2] == {"status": "failed", "error": "RuntimeError: no kernel"}


def test_each_part_of_the_backward_is_tuned_beside_the_best_of_those_before(monkeypatch):
    """By a clock that likes small tiles of queries; a wrong result is not timed."""
    small = Tiling(16, 16, 4, 1)

    def clock(run, device, seconds):
        run()
        return {"p50_ms": 1.0 if seen[-1] else 2.0}

    def spy(grad, operands, out, lse, *, tiling):
        seen.append(tiling.queries == small)
        gradients = original(grad, operands, out, lse, tiling=tiling)
        return tuple(2 * x for x in gradients) if tiling.keys == wrong else gradients

    seen, wrong, original = [False], Tiling(16, 32, 4, 1), tuning.varlen_attention_backward
    monkeypatch.setattr(tuning, "measure", clock)
    monkeypatch.setattr(tuning, "varlen_attention_backward", spy)
    for part, choices in {"queries": (small,), "keys": (wrong,)}.items():
        monkeypatch.setitem(tuning.CHOICES, part, choices)
    tried = tuned(problems.make_problem(SHAPES["queries"].shrunk(), DEVICE))
    parts = ["forward", "queries", "keys"]
    assert [part.removeprefix("backward ") for part, _, _ in tried] == sorted(
        parts * 2, key=parts.index
    )
    assert [record["status"] for _, _, record in tried] == ["ok"] * 5 + ["red_gate"]
    assert "p50_ms" not in tried[-1][2]
    assert all(tiling.queries == small for _, tiling, _ in tried[3:])


def test_least_work():
    problem = problems.make_problem(problems.Shape(((1, 3, 3), (1, 5, 5)), H=2, d=16), "cpu")
    assert problem.least_work(FORWARD) == (4 * 2 * 8 * 32, 2 * 2 * 34 * 32)
    assert problem.least_work(BOTH) == (12 * 2 * 8 * 32, 7 * 2 * 34 * 32)
