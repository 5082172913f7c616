"""Records of the benchmark of trainings become tables."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.training import figures
from benchmarks.training.suites import OURS, SUITES, THEIRS, Cell
from make_tables import TABLES
from tables import records, training
from tests.scripts.test_maxsim_tables import rows

ROOT = Path(__file__).resolve().parents[2]
NAMES = {f"training_{suite}": suite for suite in SUITES if suite not in ("integrations", "profile")}
RATES = {OURS: 3000.0, THEIRS: 750.0}


def record(suite: str, cell: Cell, **changes) -> dict:
    context = {"suite": suite, "run": f"2030-01-02-{suite}", "gpu": "Test GPU", "driver": "1.2"}
    context |= {"torch": "2.x", "triton": "3.x", "git_sha": "0123456789abcdef", "dirty": False}
    context |= {"versions": {"sentence-transformers": "6.x"}, "sm_mhz": 1500.0}
    rate = RATES[cell.trainer] * (0.5 if cell.model == "joint" else 1.0) * cell.gpus**0.5
    figures = {"examples_per_second_p50": rate, "step_ms_p50": 1e3 * cell.batch / rate}
    figures |= {"peak_allocated_gib": 25.0, "seconds_to_first_step": 12.0, "status": "ok"}
    return context | cell._asdict() | figures | changes


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """A folder with every suite of one card, the last cell first."""
    shutil.copy(ROOT / "results/paper.json", tmp_path)
    (tmp_path / "test-gpu").mkdir()
    found = [record(suite, cell) for suite, cells in SUITES.items() for cell in reversed(cells)]
    write(tmp_path / "test-gpu/training.jsonl", found)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    return tmp_path / "test-gpu"


def write(path: Path, found: list[dict]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in found))


@pytest.mark.parametrize(("name", "suite"), NAMES.items())
def test_tables_have_a_row_for_every_cell_in_order(results, name, suite):
    table = TABLES[name]()
    found = rows(table)
    assert {len(row) for row in found} == {len(found[0])}
    batches = [row[found[0].index("batch")].split()[0].replace(",", "") for row in found[2:]]
    assert batches == [str(cell.batch) for cell in SUITES[suite]]
    caption = "<sub>Test GPU; driver 1.2; torch 2.x; sentence-transformers 6.x; triton 3.x"
    assert f"{caption}; commit 012345678; 2030-01-02; median of the cells 1,500 MHz" in table


def test_ratios_are_to_the_fastest_of_the_others_on_the_same_texts(results):
    first, *others = rows(TABLES["training_splade"]())[2:]
    assert first[-1] == "4.00"
    assert {row[-1] for row in others} == {"4.00", ""}
    assert [row[-1] for row in others if row[0].startswith("sentence")] == [""] * 5
    by_name = {(row[0], row[-1]) for row in rows(TABLES["training_colbert"]())}
    assert {("colbert", "4.00"), ("sparton", ""), ("sparton_colbert", "")} <= by_name


def test_gains_over_the_compiled_head_stand_beside_the_papers(results):
    found = [record("splade", cell) for cell in SUITES["splade"]]
    for each in found:
        if each["head"] == "sparton" and each["compiled"]:
            each["examples_per_second_p50"] *= 1.5
    write(results / "training.jsonl", found)
    assert "brackets: 384: 1.50 (1.15), 512: 1.50 (1.16).\n" in TABLES["training_splade"]()


def test_a_joint_step_is_compared_with_its_slower_half(results):
    table = TABLES["training_colbert"]()
    assert "A step of the joint model takes 2.00 times that of its slower half." in table
    assert "joint model, compiled, takes 2.00" in table


def test_several_gpus_are_compared_with_one(results):
    found = {(row[0], row[1]): row[-2:] for row in rows(TABLES["training_gpus"]())}
    name = "sparton, 4 GPUs, compiled backbone"
    assert found[name, "1,536"] == found[name, "16,384 in 512s"] == ["2.00", "50%"]
    sharded = [row for row in rows(TABLES["training_decoders_gpus"]()) if "sharded" in row[0]]
    assert [row[-1] for row in sharded] == ["71%", "71%"]


def test_what_was_not_measured_is_said_and_compared_with_nothing(results):
    found = [
        record("splade", cell, status="oom" if cell.system == THEIRS else "red_gate")
        for cell in SUITES["splade"]
    ]
    write(results / "training.jsonl", found)
    for row in rows(TABLES["training_splade"]())[2:]:
        assert row[2] in ("OOM", "red_gate")
        assert not any(row[3:])
    gpus = TABLES["training_gpus"]()
    assert gpus == "Not measured yet: `python scripts/benchmark.py training --suite gpus`.\n"


def test_a_suite_of_two_runs_is_no_table(results):
    first, second = SUITES["splade"][:2]
    write(results / "training.jsonl", [record("splade", first), record("splade", second, run="2")])
    with pytest.raises(ValueError, match="mixes the runs"):
        TABLES["training_splade"]()


def test_drop_ins_are_compared_with_the_library_as_it_is(results):
    cells = SUITES["integrations"]
    found = [record("integrations", cell, loss=0.5) for cell in cells]
    found[1] |= {"examples_per_second_p50": 2250.0, "peak_allocated_gib": 10.0}
    found[-1]["status"] = "oom"
    write(results / "training.jsonl", found)
    table = rows(TABLES["integrations"]())[2:]
    assert len({row[0] for row in table}) == len(cells)
    assert table[1] == [
        "`SparseEncoder`, `fuse(model)`", "2,250", "3.00", "10.0", "0.40", "0.500",
    ]  # fmt: skip
    assert table[-1][1:] == ["OOM", "", "", "", ""]


def test_names_tell_cells_apart():
    for suite, cells in (item for item in SUITES.items() if item[0] != "integrations"):
        named = [(training.name(r), r["batch"], r["micro_batch"], r["gpus"], r["vocabulary"])
                 for r in (record(suite, cell) for cell in cells)]  # fmt: skip
        assert len(set(named)) == len(named)


def test_the_summary_has_both_kinds_at_the_same_batch(results):
    splade, colbert = rows(TABLES["summary"]())[2:]
    assert splade[:2] == ["training SPLADE, BERT-base, batch 384", "3,000 pairs/s, 25.0 GiB"]
    assert splade[2] == "750 pairs/s, 25.0 GiB (sentence-transformers)"
    assert colbert[0] == "training ColBERT, BERT-base, batch 384"


def test_a_profile_says_where_the_time_of_a_step_goes(results):
    kernels = [
        {"name": name, "calls": 1.0, "ms": ms}
        for name, ms in (
            ("nvjet_sm90_tst", 30.0),
            ("_linear_hopper_kernel", 10.0),
            ("_dkey_hopper_kernel", 3.0),
            ("_attention_hopper_kernel", 2.0),
            ("void " + "a" * 200, 1.5),
            *((f"small_{i}", 0.25) for i in range(60)),
        )
    ]
    content = {"first_step": 11, "steps": 10, "step_ms": 70.0, "kernels": kernels}
    kept = figures.profile(content)
    assert len(kept["kernels"]) == figures.KERNELS
    assert len(kept["kernels"][4]["name"]) == figures.NAME
    assert kept["others_ms"] == pytest.approx(0.25 * 5)
    found = [record("profile", cell, profile=kept) for cell in SUITES["profile"]]
    write(results / "training.jsonl", found)
    table = TABLES["training_profile"]()
    assert len({*rows(table)[0][1:]}) == len(SUITES["profile"]) == 4
    times = {name: ms for name, ms, *_ in rows(table)[2:]}
    assert times["matrix products in 16 bits"] == "40.0" and times["attention"] == "5.0"
    assert times["all kernels"] == "61.5" and times["a step by the clock"] == "70.0"
    write(results / "training.jsonl", [record("profile", cell) for cell in SUITES["profile"]])
    assert "Not measured" in TABLES["training_profile"]()
