"""Records of the head benchmark become the tables and figures of README and docs."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import make_tables
import plot_benchmarks
from benchmarks.head import suites
from benchmarks.head.study import STUDY as HEAD
from benchmarks.head.suites import SUITES, Cell
from tables import records
from tables.endurance import endurance

ROOT = Path(__file__).resolve().parents[2]
MS = {suites.GEMM: 12.0, "sparton": 10.0, "sparton_hybrid": 40.0, "tiled": 60.0}
SUITE_TABLES = [name for name in SUITES if name in make_tables.TABLES and name != "profile"]


def bars_table() -> str:
    return make_tables.TABLES["bars"]()


def record(suite: str, cell: Cell) -> dict:
    """Times of a made-up card; memory of the operands and results."""
    N, S, V = 320, 512, 30522
    if cell.shape in suites.LONG:
        N, S = 128, int(cell.shape.split("x")[1])
    results = 8 * N * V + 2**20
    gradients = 2 * (N * S + V) * 768 + 4 * V
    peak = results + gradients if cell.mode == suites.FORWARD_BACKWARD else results
    milliseconds = MS.get(cell.head, 80.0) * (S / 512) * (0.5 if cell.shape == "mix60" else 1.0)
    context = {"suite": suite, "run": "2030-01-02T03:04:05", "gpu": "Test GPU", "driver": "1.2"}
    context |= {"torch": "2.x", "triton": "3.x", "git_sha": "0123456789abcdef", "dirty": False}
    context |= {"sm_mhz": 1500.0, "power_w": 700.0}
    sizes = {"N": N, "S": S, "T": N * S, "D": 768, "V": V}
    shares = {"active_share": 0.01, "top3_share": 0.7}
    figures = {"p50_ms": milliseconds, "peak_bytes": peak, "total_peak_bytes": 2 * peak}
    return context | cell._asdict() | sizes | shares | figures | {"status": "ok"}


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """A results folder with every suite of one card."""
    shutil.copy(ROOT / "results/paper.json", tmp_path)
    (tmp_path / "test-gpu").mkdir()
    files: dict[str, set[Cell]] = {}
    for suite, cells in SUITES.items():
        files.setdefault(HEAD.file_of(suite), set()).update(cells)
    for name, cells in files.items():
        lines = [json.dumps(record(name, cell)) + "\n" for cell in sorted(cells)]
        (tmp_path / f"test-gpu/{name}.jsonl").write_text("".join(lines))
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    return tmp_path


def change(path: Path, cell: Cell, **changes) -> None:
    """Give the record of a cell other fields; None removes one."""
    lines = []
    for found in map(json.loads, path.read_text().splitlines()):
        if all(found[key] == value for key, value in cell._asdict().items()):
            found = {k: v for k, v in (found | changes).items() if v is not None}
        lines.append(json.dumps(found) + "\n")
    path.write_text("".join(lines))


def row(table: str, start: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", SUITE_TABLES)
def test_every_table_is_complete_and_says_where_it_comes_from(results, name):
    table = make_tables.TABLES[name]()
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) >= 6
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert "?" not in table
    caption = "Test GPU; driver 1.2; torch 2.x; triton 3.x; commit 012345678; 2030-01-02"
    assert f"<sub>{caption}; median of the cells 1,500 MHz" in table


@pytest.mark.parametrize("name", SUITE_TABLES)
def test_without_records_a_table_says_so(tmp_path, monkeypatch, name):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert make_tables.TABLES[name]() == records.NOT_MEASURED.format(f"head --suite {name}")


@pytest.mark.parametrize("name", SUITE_TABLES)
@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_file_is_no_measurement(tmp_path, monkeypatch, name, content):
    (tmp_path / "a-gpu").mkdir()
    for file in map(HEAD.file_of, SUITES):
        (tmp_path / f"a-gpu/{file}.jsonl").write_text(content)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert make_tables.TABLES[name]() == records.NOT_MEASURED.format(f"head --suite {name}")
    monkeypatch.setattr(plot_benchmarks, "FIGURES", tmp_path / "figures")
    plot_benchmarks.main()
    assert not (tmp_path / "figures").exists()


def test_a_figure_is_shown_once_it_is_drawn(results, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FIGURES", tmp_path)
    assert "![" not in make_tables.TABLES["figure2"]()
    (tmp_path / "figure2-test-gpu.svg").touch()
    assert "(figures/figure2-test-gpu.svg)" in make_tables.TABLES["figure2"]()


def test_the_papers_figures_stand_beside_the_cells_they_belong_to(results):
    table2 = make_tables.TABLES["table2"]()
    assert row(table2, "1,024")[1] == "120.0 (279.5)"
    assert row(table2, "1,024")[5] == "80.0 (71.2)"
    assert row(table2, "S")[1:3] == ["tiled ms", "tiled GiB (GB)"]
    assert row(table2, "1,024")[2].endswith(" (8.51)")
    assert row(table2, "4,096")[3] == "640.0 (OOM)"
    assert "(" not in "".join(row(table2, "16,384"))
    table1 = make_tables.TABLES["table1"]()
    assert row(table1, "forward: + tiled head")[1] == "60.0 (140.3)"
    assert row(table1, "forward + backward: + sparton_hybrid")[3] == "40.0 (423.9)"
    assert "(" not in row(table1, "forward: + **sparton**")[1]


def test_bars_are_met_or_not_by_what_was_measured(results):
    path = results / "test-gpu/head.jsonl"
    verdicts = [row[-1] for row in bar_rows()]
    assert verdicts[0] == "yes"
    assert row(bars_table(), "all entries active")[3:] == [
        "10.0 / 40.0 ms = 0.250",
        "yes",
    ]
    change(path, Cell(suites.TABLE1, "sparton", suites.FORWARD_BACKWARD), p50_ms=18.1)
    assert row(bars_table(), "all entries active")[3:] == [
        "18.1 / 40.0 ms = 0.453",
        "**no**",
    ]
    change(path, Cell(suites.TABLE1, "sparton_hybrid", suites.FORWARD_BACKWARD), p50_ms=None)
    change(path, Cell(suites.TABLE1, "sparton_hybrid", suites.FORWARD_BACKWARD), status="oom")
    assert row(bars_table(), "all entries active")[3:] == ["18.1 / OOM ms", "?"]


def bar_rows() -> list[list[str]]:
    lines = bars_table().splitlines()[2:]
    return [[x.strip() for x in line.strip("|").split("|")] for line in lines if "|" in line]


def test_scratch_memory_is_what_is_left_beside_results_and_gradients(results):
    path = results / "test-gpu/head.jsonl"
    cell = Cell(suites.TABLE1, "sparton", suites.FORWARD_BACKWARD)
    assert row(bars_table(), "memory beyond gradients")[3] == "outputs + argmax + 1.0 MiB"
    peak = record("bars", cell)["peak_bytes"]
    change(path, cell, peak_bytes=peak + 16 * 2**20)
    found = row(bars_table(), "memory beyond gradients")[3:]
    assert found == ["outputs + argmax + 17.0 MiB", "**no**"]


def test_long_sequences_must_stay_linear(results):
    assert row(bars_table(), "long sequences")[-1] == "yes"
    longest = Cell(suites.LONG[-1], "sparton", suites.FORWARD_BACKWARD)
    change(results / "test-gpu/head_table2.jsonl", longest, p50_ms=400.0)
    assert row(bars_table(), "long sequences")[-1] == "**no**"


def test_records_of_two_runs_make_no_table(results):
    cell = Cell(suites.TABLE1, suites.GEMM)
    change(results / "test-gpu/head.jsonl", cell, run="another")
    with pytest.raises(ValueError, match="mixes the runs"):
        bars_table()


def test_pages_are_filled_and_a_changed_figure_is_noticed(results):
    page = "before\n<!-- table: bars -->\nold\n<!-- end -->\nafter\n"
    filled = make_tables.filled(page)
    assert filled != page
    assert filled.startswith("before\n<!-- table: bars -->\n| bar |")
    assert filled.endswith("<!-- end -->\nafter\n")
    assert make_tables.filled(filled) == filled
    assert make_tables.filled(filled.replace("0.250", "0.240")) == filled


@pytest.mark.parametrize("behind", ["<!-- table: bars -->\nold\n<!-- end -->\n", ""])
def test_a_block_without_an_end_is_refused(results, behind):
    """Nothing of what a person wrote behind it is lost."""
    page = f"<!-- table: heads -->\nold\nA person's words.\n{behind}"
    with pytest.raises(ValueError, match="<!-- table: heads --> has no <!-- end -->"):
        make_tables.filled(page)


def test_a_page_is_named_where_a_block_has_no_end(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text("<!-- table: bars -->\n")
    monkeypatch.setattr(make_tables, "ROOT", tmp_path)
    monkeypatch.setattr(make_tables, "PAGES", ("page.md",))
    monkeypatch.setattr(sys, "argv", ["make_tables.py"])
    with pytest.raises(SystemExit, match=r"page\.md: <!-- table: bars -->"):
        make_tables.main()
    assert (tmp_path / "page.md").read_text() == "<!-- table: bars -->\n"


def test_what_has_no_three_lines_has_no_thirds():
    """A CPU has no memory of a GPU, and a run of two lines has no rows."""
    lines = [{"step": 10 * n, "step_ms": float(n), "open_files": 5} for n in range(1, 4)]
    rows = endurance([*lines[:2], {**lines[2], "gpu_mib": 7.0}]).splitlines()
    assert rows[0] == "30 steps."
    assert rows[4:] == ["| open files | 5.0 | 5.0 | 5.0 |", "| a step, ms | 1.00 | 2.00 | 3.00 |"]
    assert endurance(lines[:2]).splitlines()[0] == "20 steps."


@pytest.mark.parametrize("page", make_tables.PAGES)
def test_the_pages_hold_what_the_records_say(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert make_tables.filled(text) == text


def test_figures_are_the_same_whenever_they_are_drawn(results, tmp_path, monkeypatch):
    monkeypatch.setattr(plot_benchmarks, "ROOT", tmp_path)
    monkeypatch.setattr(plot_benchmarks, "FIGURES", tmp_path / "figures")
    drawn = []
    for _ in range(2):
        plot_benchmarks.main()
        drawn.append((tmp_path / "figures/figure2-test-gpu.svg").read_bytes())
    assert drawn[0] == drawn[1]
    assert b"sparton_hybrid" in drawn[0]


def test_the_summary_has_rows_of_what_was_measured(results):
    table = make_tables.TABLES["summary"]
    assert "10.0 ms" in table()
    assert "80.0 ms" in table(), "torch.compile"
    assert "40.0 ms" in table(), "the paper's design"
    cell = Cell(suites.TABLE1, "compiled", suites.FORWARD_BACKWARD)
    change(results / "test-gpu/head.jsonl", cell, p50_ms=None, status="oom")
    assert table() == "Not measured yet.\n"


def test_the_summary_compares_rates_of_one_run_and_equal_bits(results):
    own = {"gpu": "Test GPU", "kind": "splade", "size": "base"}
    rates = {"sparton": 4000.0, "forward alone": 5000.0, "sentence-transformers": 800.0}
    lines = [own | {"library": name, "texts_per_s": rate} for name, rate in rates.items()]
    lines.append(lines[-1] | {"texts_per_s": 900.0})
    lines.append(lines[-1] | {"size": "minilm", "texts_per_s": 9000.0})
    (results / "test-gpu/encoding.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    cells = {"exhaustive": 100.0, "fast_plaid": 30.0, "fast_plaid_2_bits": 20.0}
    size = {"gpu": "Test GPU", "documents": 100_000, "queries": 256, "k": 100, "nbits": 2}
    lines = [size | {"provider": name, "queries_per_s": rate} for name, rate in cells.items()]
    (results / "test-gpu/compressed_search.jsonl").write_text(
        "".join(json.dumps(x) + "\n" for x in lines)
    )
    *_, encoding, search = make_tables.TABLES["summary"]().splitlines()
    assert "| 4,000 texts/s | 900 texts/s (sentence-transformers) | Test GPU |" in encoding
    assert "2 bits | 100 queries/s | 20 queries/s (fast-plaid) | Test GPU |" in search
