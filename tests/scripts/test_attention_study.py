"""The study of attention in miniature: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from benchmarks import gate
from benchmarks.attention import problems, providers, tuning
from benchmarks.attention.problems import ALLOWED, BOTH, FORWARD, SHAPES
from benchmarks.attention.study import STUDY, TUNED
from benchmarks.gate import passes
from benchmarks.kernels import KernelCell
from benchmarks.study import Settings
from sparton.kernels.varlen_attention.tiles import Tiling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OWN = ("sparton", "sdpa_efficient")


SETTINGS = Settings(DEVICE, 0.001, "", True, {"terabytes": 4.3, "tflop": 790.0})


def test_providers_are_measured():
    cells = [KernelCell("queries", mode, provider) for mode in (FORWARD, BOTH) for provider in OWN]
    measure = STUDY.prepare(cells, SETTINGS)
    for cell in cells:
        record = measure(cell)
        assert record["status"] == "ok", record
        assert 0 < record["p20_ms"] <= record["p50_ms"] <= record["p80_ms"]
        assert record["memory_floor_ms"] >= 0 and record["bytes"] > 0
        assert record["errors"]["norm"] < 0.005
        assert f"{record['p50_ms']:.4f} ms" in STUDY.words(record)


def test_tilings_are_records_of_one_cell():
    for mode, count in zip(TUNED, (2, 4), strict=True):
        cell = KernelCell("queries", mode, "sparton")
        tried = STUDY.prepare([cell], SETTINGS)(cell)
        assert [record["status"] for record in tried] == ["ok"] * count
        assert all(record["tiling"] in STUDY.words(record) for record in tried)


@pytest.mark.parametrize("provider", OWN)
@pytest.mark.parametrize("name", ["documents", "queries_documents"])
def test_providers_agree_with_truth(name, provider):
    problem = problems.make_problem(SHAPES[name].shrunk(), DEVICE)
    expected = problems.truth(problem)
    tried = providers.attempt(provider, problem)
    assert passes(problems.errors(tried.results(BOTH), expected), ALLOWED)
    assert passes(problems.errors(tried.results(FORWARD), expected), ALLOWED)


def test_wrong_results_get_no_time():
    problem = problems.make_problem(SHAPES["documents"].shrunk(), DEVICE)
    right = problems.truth(problem)
    assert passes(problems.errors(right, right), ALLOWED)
    rows = len(right[0])
    for place in range(4):
        wrong = [x.clone() for x in right]
        wrong[place] *= 1.02
        assert not passes(problems.errors(wrong, right), ALLOWED), "too large"
        wrong[place] = right[place].clone()
        wrong[place][rows // 2] = 0
        assert not passes(problems.errors(wrong, right), ALLOWED), "a token left out"
        wrong[place][rows // 2, 0, 0] = float("nan")
        assert not passes(problems.errors(wrong, right), ALLOWED), "not a number"


def test_what_fails_is_a_row(monkeypatch):
    def refusing(*args, **kwargs):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(tuning, "timed_if_right", refusing)
    problem = problems.make_problem(SHAPES["queries"].shrunk(), DEVICE)
    first, *_ = tuning.tune_forward(problem, problems.truth(problem), SETTINGS)
    assert first.pop("tiling")
    assert first == {"status": "failed", "error": "RuntimeError: no kernel"}


def test_each_part_of_the_backward_is_tuned_beside_the_best_of_those_before(monkeypatch):
    """By a clock that likes small tiles of queries; a wrong result is not timed."""
    small = Tiling(16, 16, 4, 1)

    def clock(run, device, seconds):
        run()
        return {"p50_ms": 1.0 if seen[-1].queries == small else 2.0}

    def spy(grad, operands, out, lse, *, tiling):
        seen.append(tiling)
        gradients = original(grad, operands, out, lse, tiling=tiling)
        return tuple(2 * x for x in gradients) if tiling.keys == wrong else gradients

    seen, wrong = [], Tiling(16, 32, 4, 1)
    original = tuning.backward.varlen_attention_backward
    monkeypatch.setattr(gate, "measure", clock)
    monkeypatch.setattr(tuning.backward, "varlen_attention_backward", spy)
    for part, choices in {"queries": (small,), "keys": (wrong,)}.items():
        monkeypatch.setitem(tuning.BACKWARDS, part, choices)
    problem = problems.make_problem(SHAPES["queries"].shrunk(), DEVICE)
    tried = list(tuning.tune_backward(problem, problems.truth(problem), SETTINGS))
    assert [record["status"] for record in tried] == ["ok"] * 3 + ["red_gate"]
    assert "p50_ms" not in tried[-1]
    launched = list(dict.fromkeys(seen))
    assert launched[1].queries == small and launched[1].keys == launched[0].keys
    assert launched[2] == launched[1]._replace(keys=wrong)
    assert [record["tiling"] for record in tried[2:]] == [str(x) for x in launched[1:]]


def test_least_work():
    problem = problems.make_problem(problems.Shape(((1, 3, 3), (1, 5, 5)), H=2, d=16), "cpu")
    assert problem.least_work(FORWARD) == (4 * 2 * 8 * 32, 2 * 2 * 34 * 32)
    assert problem.least_work(BOTH) == (12 * 2 * 8 * 32, 7 * 2 * 34 * 32)
