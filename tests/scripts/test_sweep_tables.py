"""The report of a sweep becomes a table of docs/, beside the paper's figures."""

import json
import shutil

import pytest

import make_tables
from sparton.sweeps.report import read_records
from tables import records, sweeps
from tests.sweeps.test_report import leave_cell


@pytest.fixture
def results(tmp_path, monkeypatch):
    folder = tmp_path / "results"
    folder.mkdir()
    shutil.copy(records.RESULTS / "paper.json", folder)
    for module in (records, sweeps):
        monkeypatch.setattr(module, "RESULTS", folder)
    return folder


def test_nothing_measured_says_how_to(results):
    assert "experiment=table3`" in make_tables.TABLES["table3"]()
    assert "experiment=table3_multilingual`" in make_tables.TABLES["table3_multilingual"]()
    assert "evaluation=in_domain`" in make_tables.TABLES["table3_in_domain"]()


def test_the_rows_of_a_sweep_stand_beside_the_papers(results, tmp_path):
    leave_cell(tmp_path / "sweep", "sparton", 512, rate=2000.0)
    leave_cell(tmp_path / "sweep", "compiled", 384, "oom")
    hardware = {"gpu": "Test GPU", "driver": "1.2", "cpu": "x86"}
    packages = {"torch": "2.x", "triton": "3.x"}
    environment = {"hardware": hardware, "packages": packages, "config": {"examples": 25_930_752}}
    environment["git"] = {"sha": "0123456789abcdef", "dirty": False}
    lines = [record | {"environment": environment} for record in read_records(tmp_path / "sweep")]
    (results / "test-gpu").mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for study in ("table3", "table3_in_domain"):
        (results / f"test-gpu/{study}.jsonl").write_text(text)
    table = make_tables.TABLES["table3"]()
    assert "| compiled | 384 | oom |" in table and "(506)" in table
    assert "2,001 (588)" in table and "0.500 (0.427)" in table and "4.0 (128.6)" in table
    assert [line for line in table.splitlines() if line.startswith("| Splade-V3 |")] == [
        "| Splade-V3 |  | published |  |  |  |  |  | (0.422) |"
    ]
    alone = make_tables.TABLES["table3_in_domain"]()
    assert "| 0.500 |" in alone and "(" not in alone and "25,930,752" not in alone
    assert "<sub>Test GPU; driver 1.2; torch 2.x; triton 3.x; commit 012345678</sub>" in table
