"""The study of MaxSim without a GPU: its shapes, its judge, its records."""

import pytest
import torch

from benchmarks import processes
from benchmarks.kernels import KernelCell, floors
from benchmarks.maxsim import problems, providers
from benchmarks.maxsim.providers import PROVIDERS, Provider
from benchmarks.maxsim.shapes import BOTH, FORWARD, SHAPES, Shape, least_work
from benchmarks.maxsim.study import STUDY
from benchmarks.study import Settings

CEILINGS = {"terabytes": 4.3, "tflop": 790.0}
SETTINGS = Settings("cpu", 0.001, "", True, CEILINGS)
OWN_PROVIDERS = [name for name in PROVIDERS if name.startswith(("sparton", "eager"))]


def measured(*fields: str, settings: Settings = SETTINGS) -> dict:
    cell = KernelCell(*fields)
    return STUDY.prepare([cell], settings)(cell)


@pytest.mark.parametrize("cell", providers.cells(SHAPES, OWN_PROVIDERS), ids=str)
def test_every_shape_passes_its_gate_and_is_timed(cell):
    record = measured(*cell)
    assert record["status"] == "ok", record
    assert 0 < record["p20_ms"] <= record["p50_ms"] <= record["p80_ms"]
    assert record["share_of_floor"] >= 0


@pytest.mark.parametrize(
    "kind", ["cross", "packed", pytest.param("hidden", marks=pytest.mark.slow)]
)
def test_near_ties_of_full_documents_pass(monkeypatch, kind):
    shape = Shape(4, 6, 32, 300, (BOTH,), kind, H=768 if kind == "hidden" else 0)
    monkeypatch.setitem(SHAPES, "tried", shape)
    for name in ("sparton", "eager"):
        record = measured("tried", BOTH, name, settings=SETTINGS._replace(miniature=False))
        assert record["status"] == "ok", record


def wrong(change):
    """A provider whose results are those of ours after a change."""
    return Provider(lambda problem: lambda q, d: change(providers.sparton(problem), q, d))


def nothing(score, q, d):
    return score(q, d)


def scaled_scores(score, q, d):
    return 1.03 * score(q, d)


def padding_wins(score, q, d):
    return score(q, torch.nn.functional.pad(d, (0, 0, 0, 1), value=0.3))


def one_document_of_another(score, q, d):
    return score(q, d).roll(1, 1)


def unwritten(score, q, d):
    return score(q, d).index_fill(1, torch.tensor([-1]), float("nan"))


def scaled_gradients(score, q, d):
    found = score(q, d)
    return 1.03 * found - 0.03 * found.detach()


def no_document_gradient(score, q, d):
    return score(q, d.detach()) + 0 * d.sum().float()


def neighbouring_token(score, q, d):
    passed = d * 1
    if passed.requires_grad:
        passed.register_hook(lambda gradient: gradient.roll(1, -2))
    return score(q, passed)


WRONG_SCORES = [scaled_scores, padding_wins, one_document_of_another, unwritten]
WRONG_GRADIENTS = [scaled_gradients, no_document_gradient, neighbouring_token]


@pytest.mark.parametrize("change", [nothing, *WRONG_SCORES])
@pytest.mark.parametrize("shape", ["1x1000_32x1024", "4x8_own_512x512"])
def test_wrong_scores_get_no_time(monkeypatch, change, shape):
    monkeypatch.setitem(PROVIDERS, "tried", wrong(change))
    record = measured(shape, FORWARD, "tried")
    assert record["status"] == ("ok" if change is nothing else "red_gate"), record
    assert ("p50_ms" in record) == (change is nothing)


@pytest.mark.parametrize("change", [nothing, *WRONG_GRADIENTS])
@pytest.mark.parametrize("ties", [problems.EXACT, problems.ROUNDED])
def test_wrong_gradients_get_no_time(monkeypatch, change, ties):
    monkeypatch.setitem(PROVIDERS, "tried", wrong(change)._replace(ties=ties))
    record = measured("128x128_32x300", BOTH, "tried")
    assert record["status"] == ("ok" if change is nothing else "red_gate"), record
    assert ("p50_ms" in record) == (change is nothing)


def test_truth_in_chunks_is_truth_at_once(monkeypatch):
    for name in ("4x8_own_512x512", "64x512_packed", "64x64_hidden"):
        problem = problems.make_problem(SHAPES[name].shrunk(), "cpu")
        whole = problems.truth(problem, True)
        with monkeypatch.context() as patch:
            patch.setattr(problems, "SIMILARITIES_AT_ONCE", 1)
            parts = problems.truth(problem, True)
        for key, value in whole.items():
            torch.testing.assert_close(parts[key], value, rtol=1e-4, atol=1e-5)


def test_least_work():
    shape = Shape(2, 3, 5, 7, E=11)
    forward = least_work(shape, FORWARD, 100, 21)
    assert forward == (100 + 4 * 6, 2 * 2 * 5 * 21 * 11)
    both = least_work(shape, BOTH, 100, 21)
    assert both == (300 + 8 * 6, forward[1] + 4 * 6 * 5 * 11)
    own = shape._replace(kind="own")
    assert least_work(own, FORWARD, 100, 42)[1] == 2 * 5 * 42 * 11
    found = floors(2 * 10**9, 10**12, SETTINGS._replace(options={"terabytes": 1, "tflop": 1}), 2.0)
    assert (found["memory_floor_ms"], found["flop_floor_ms"]) == (2.0, 500.0)


@pytest.mark.slow
def test_the_cells_of_a_shape_share_a_process_and_a_failure_costs_one_cell():
    cells = [KernelCell("1x1000_32x1024", FORWARD, name) for name in ("sparton", "eager", "flash")]
    cells.append(KernelCell("128x128_32x300", FORWARD, "sparton"))
    found = dict(processes.run_cells(STUDY, cells, SETTINGS))
    assert list(found) == cells
    assert [record["status"] for (record,) in found.values()] == ["ok", "ok", "absent", "ok"]
    broken = SETTINGS._replace(device="nonsense")
    found = dict(processes.run_cells(STUDY, cells[-2:], broken))
    assert [record["status"] for (record,) in found.values()] == ["failed"] * 2
    assert "nonsense" in found[cells[-1]][0]["error"]
