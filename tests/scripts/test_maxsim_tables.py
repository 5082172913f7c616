"""Records of the MaxSim benchmark become tables and the roofline."""

import json

import pytest

import plot_benchmarks
from benchmarks.kernels import KernelCell as Cell
from benchmarks.maxsim.providers import PROVIDERS, cells
from benchmarks.maxsim.shapes import SHAPES
from make_tables import TABLES
from tables import records
from tables.maxsim import TARGETS

NAMES = ("maxsim_targets", "maxsim_forward", "maxsim_backward")
MS = {"sparton": 0.2, "sparton_fp8_tensor": 0.1, "lik": 1.0, "lik_projected": 0.5, "flash": 0.8}


def record(cell: Cell) -> dict:
    context = {"run": "2030-01-02T03:04:05", "gpu": "Test GPU", "driver": "1.2", "dirty": False}
    context |= {"torch": "2.x", "triton": "3.x", "git_sha": "0123456789abcdef"}
    context |= {"ceilings": {"terabytes_per_s": 4.0, "tflop_per_s": 800.0}}
    work = {"bytes": 10**8, "flop": 10**10, "memory_floor_ms": 0.025, "flop_floor_ms": 0.0125}
    time = MS.get(cell.provider, 2.0)
    figures = {"p50_ms": time, "share_of_floor": round(0.025 / time, 4), "status": "ok"}
    figures["device_ms"] = time / 2
    return context | cell._asdict() | work | figures


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes records of one card; the cells of ``changed`` get other fields."""

    def written(changed: dict[Cell, dict] | None = None) -> None:
        (tmp_path / "test-gpu").mkdir(exist_ok=True)
        lines = []
        for cell in cells(SHAPES, PROVIDERS):
            changes = (changed or {}).get(cell, {})
            found = {k: v for k, v in (record(cell) | changes).items() if v is not None}
            lines.append(json.dumps(found) + "\n")
        (tmp_path / "test-gpu/maxsim.jsonl").write_text("".join(lines))

    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(records, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(plot_benchmarks, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(plot_benchmarks, "ROOT", tmp_path)
    return written


def rows(table: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_complete(write, name):
    write()
    table = TABLES[name]()
    found = rows(table)
    assert len(found) > len(TARGETS)
    assert {len(row) for row in found} == {len(found[0])}
    assert "?" not in table
    assert "<sub>Test GPU; driver 1.2" in table


def test_targets_compare_with_the_best_rival(write):
    write()
    by_name = {(row[0], row[2]): row for row in rows(TABLES["maxsim_targets"]())}
    assert by_name["training", "forward"][4:] == [
        "0.200 (0.100) / 0.800 (0.400) ms, flash-maxsim: 0.25",
        "yes",
    ]
    assert by_name["from hidden states", "forward and backward"][5] == "yes"
    assert by_name["compressed, 2 bits", "forward"][5] == "**no**"
    assert by_name["FP8", "forward"][4].endswith("ms, sparton: 0.50")


def test_what_was_not_timed_is_said(write):
    own = Cell("128x128_32x300", "forward", "sparton")
    rival = Cell("1x10000_residual_2", "forward", "lik")
    red = {"p50_ms": None, "status": "red_gate"}
    absent = {"p50_ms": None, "status": "absent"}
    write()
    assert "compressed, 2 bits" in TABLES["maxsim_targets"]()
    write({own: red, rival: absent})
    by_name = {(row[0], row[2]): row for row in rows(TABLES["maxsim_targets"]())}
    assert by_name["training", "forward"][4:] == ["red_gate", "?"]
    assert ("compressed, 2 bits", "forward") not in by_name
    forward = {row[0]: row for row in rows(TABLES["maxsim_forward"]())}
    assert "red_gate" in forward["128x128_32x300"]
    assert "absent" in forward["1x10000_residual_2"]
    assert forward["1x10000_32x300"].count("**0.200** (0.100)") == 1


def test_the_roofline_is_drawn_and_shown(write, tmp_path):
    write()
    assert "![" not in TABLES["maxsim_forward"]()
    plot_benchmarks.main()
    figure = (tmp_path / "figures/roofline-test-gpu.svg").read_text()
    assert "128x128_32x300" in figure
    assert "residual" not in figure
    assert "(figures/roofline-test-gpu.svg)" in TABLES["maxsim_forward"]()


def test_other_runs_have_tables_of_their_own(write, tmp_path):
    write()
    assert "Not measured" in TABLES["maxsim_rest"]()
    cell = Cell("4x8_own_512x512", "forward_backward", "sparton")
    line = json.dumps(record(cell) | {"p50_ms": 0.5}) + "\n"
    (tmp_path / "test-gpu/maxsim_rest.jsonl").write_text(line)
    assert [row[0] for row in rows(TABLES["maxsim_rest"]())][-1] == cell.shape
    (tmp_path / "test-gpu/maxsim_rest.jsonl").write_text(
        line + line.replace(json.loads(line)["run"], "2030-01-02T03")
    )
    with pytest.raises(ValueError, match="mixes the runs"):
        TABLES["maxsim_rest"]()


def test_the_summary_names_the_best_peer(write):
    write()
    assert "0.20 ms" in TABLES["summary"]()
    assert "0.80 ms" in TABLES["summary"]()
    assert "(flash-maxsim)" in TABLES["summary"]()
