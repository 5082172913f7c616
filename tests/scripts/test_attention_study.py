"""The study of attention in miniature: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from benchmarks.attention import problems, providers
from benchmarks.attention.problems import ALLOWED, BOTH, SHAPES
from benchmarks.attention.study import STUDY
from benchmarks.gate import passes
from benchmarks.kernels import FORWARD, KernelCell
from benchmarks.study import Settings

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


def test_least_work():
    problem = problems.make_problem(problems.Shape(((1, 3, 3), (1, 5, 5)), H=2, d=16), "cpu")
    assert problem.least_work(FORWARD) == (4 * 2 * 8 * 32, 2 * 2 * 34 * 32)
    assert problem.least_work(BOTH) == (12 * 2 * 8 * 32, 7 * 2 * 34 * 32)
