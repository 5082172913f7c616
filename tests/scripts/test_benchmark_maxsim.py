"""The MaxSim benchmark without a GPU: its shapes, its gate, its records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmark_maxsim
from maxsim_benchmark import gate, problems, providers, runner, worker
from maxsim_benchmark.providers import PROVIDERS, Cell, Provider
from maxsim_benchmark.shapes import BOTH, FORWARD, SHAPES, Shape, least_work

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/benchmark_maxsim.py"
SETTINGS = worker.Settings("cpu", 0.001, True, 4.3, 790.0)
OWN_PROVIDERS = [name for name in PROVIDERS if name.startswith(("sparton", "eager"))]


def measured(shape: str, mode: str, provider: str) -> worker.Record:
    problem, truth = worker.prepare(shape, mode == BOTH, SETTINGS)
    return worker.measure_cell(Cell(shape, mode, provider), problem, truth, SETTINGS)


@pytest.mark.parametrize("cell", providers.cells(list(SHAPES), OWN_PROVIDERS), ids=str)
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
    settings = SETTINGS._replace(miniature=False)
    problem, truth = worker.prepare("tried", True, settings)
    for name in ("sparton", "eager"):
        record = worker.measure_cell(Cell("tried", BOTH, name), problem, truth, settings)
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
@pytest.mark.parametrize("ties", [gate.EXACT, gate.ROUNDED])
def test_wrong_gradients_get_no_time(monkeypatch, change, ties):
    monkeypatch.setitem(PROVIDERS, "tried", wrong(change)._replace(ties=ties))
    record = measured("128x128_32x300", BOTH, "tried")
    assert record["status"] == ("ok" if change is nothing else "red_gate"), record
    assert ("p50_ms" in record) == (change is nothing)


def test_out_of_memory_refusals_and_missing_packages_are_rows(monkeypatch):
    def raising(error):
        def build(problem):
            raise error

        return Provider(build)

    for error, status in (
        (torch.OutOfMemoryError("too large"), "oom"),
        (ValueError("E must be 64"), "failed"),
        (ImportError("no such package"), "absent"),
    ):
        monkeypatch.setitem(PROVIDERS, "tried", raising(error))
        assert measured("1x1000_32x1024", FORWARD, "tried")["status"] == status


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
    assert both == (300 + 8 * 6, forward.flop + 4 * 6 * 5 * 11)
    own = shape._replace(kind="own")
    assert least_work(own, FORWARD, 100, 42).flop == 2 * 5 * 42 * 11
    assert forward.floors(1.0, 1.0)["memory_floor_ms"] == pytest.approx(1.24e-7, abs=1e-5)


@pytest.mark.slow
def test_a_crash_costs_one_cell():
    cells = [Cell("1x1000_32x1024", FORWARD, name) for name in ("sparton", "eager")]
    cells.append(Cell("128x128_32x300", FORWARD, "sparton"))
    broken = SETTINGS._replace(device="nonsense")
    found = list(runner.run_cells(cells, broken))
    assert [cell for cell, _ in found] == cells
    assert [record["status"] for _, record in found] == ["crashed"] * 3
    assert "nonsense" in found[0][1]["error"]
    assert list(runner.run_cells(cells, SETTINGS, deadline=0.0)) == []


@pytest.mark.slow
def test_processes_wait_for_their_turn():
    """The next shape's has started meanwhile; whoever stops early leaves none behind."""
    cells = [Cell(shape, FORWARD, "sparton") for shape in list(SHAPES)[:3]]
    found = list(runner.run_cells(cells, SETTINGS))
    assert [(cell, record["status"]) for cell, record in found] == [(cell, "ok") for cell in cells]
    process = runner.Process(cells[:1], SETTINGS)
    with pytest.raises(subprocess.TimeoutExpired):
        process._process.wait(0.5)
    process.stop()
    assert process._process.poll() is not None


def run_script(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--miniature", "--seconds", "0.001"]
    return subprocess.run([*command, *map(str, words)], capture_output=True, text=True)


@pytest.mark.slow
def test_the_program_writes_records_and_goes_on_where_it_stopped(tmp_path):
    output = tmp_path / "maxsim.jsonl"
    part = ("--shapes", "128x128_32x300", "--providers", "sparton", "eager", "--output", output)
    process = run_script(*part)
    assert process.returncode == 0, process.stderr
    lines = output.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines]
    assert [(r["mode"], r["provider"], r["status"]) for r in records] == [
        (mode, name, "ok") for mode in (FORWARD, BOTH) for name in ("sparton", "eager")
    ]
    said = {"command", "git_sha", "dirty", "gpu", "driver", "torch", "triton", "seed", "run"}
    assert all(said < set(record) for record in records)
    output.write_text("".join(lines[:3]) + lines[3][:20])
    process = run_script(*part)
    assert "4 cells, 1 to measure" in process.stdout, process.stderr
    assert output.read_text().splitlines(keepends=True)[:3] == lines[:3]
    output.write_text("".join([json.dumps(records[0] | {"status": "absent"}) + "\n", *lines[1:]]))
    assert "4 cells, 1 to measure" in run_script(*part).stdout
    again = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(r["provider"], r["status"]) for r in again[2:]] == [("eager", "ok"), ("sparton", "ok")]
    records[0]["git_sha"] = "another"
    output.write_text("".join(json.dumps(record) + "\n" for record in records))
    process = run_script(*part)
    assert process.returncode and "--fresh" in process.stderr


def test_arguments_that_cannot_be_right(capsys):
    with pytest.raises(SystemExit):
        benchmark_maxsim.parse_arguments(["--device", "cpu", "--miniature"])
    assert "--output" in capsys.readouterr().err
