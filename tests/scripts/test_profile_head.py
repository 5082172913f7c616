"""What Nsight Compute prints becomes records, records become a table."""

import argparse
import json
import subprocess

import pytest

from benchmarks.head.profile import METRICS, STALL, profile
from benchmarks.head.suites import COUNTERS, Cell
from make_tables import TABLES
from tables import records

DURATION, TENSOR = (METRICS[name][0] for name in ("microseconds", "tensor_pipe_pct"))
BARRIER, WAIT, GMMA = (STALL.format(name) for name in ("barrier", "wait", "gmma"))
CELL = Cell("2x8x64", "sparton", COUNTERS)
HEADER = ["ID", "Kernel Name", DURATION, TENSOR, BARRIER, WAIT, GMMA]


def printed(*rows: list[str]) -> str:
    lines = [HEADER, ["", "", "ns", "%", "", "", ""], *rows]
    text = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    return f"==PROF== Connected\n{text}\n"


@pytest.fixture
def ncu(monkeypatch):
    """Answers as ncu would."""
    answer = argparse.Namespace(returncode=0, stdout="", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    return answer


def test_a_launch_is_a_record_in_our_units(ncu):
    ncu.stdout = printed(["0", "_count_kernel(int)", "43,040", "12.5", "1.5", "n/a", "3.0"])
    [record] = profile(CELL)
    stalls = {"gmma": 3.0, "barrier": 1.5}
    expected = {"kernel": "_count_kernel", "microseconds": 43.04, "tensor_pipe_pct": 12.5}
    assert record == {**expected, "stalls": stalls, "status": "ok"}
    assert list(record["stalls"]) == list(stalls)


def test_what_ncu_refuses_is_shown(ncu):
    ncu.returncode, ncu.stdout = 1, "==ERROR== ERR_NVGPUCTRPERM"
    with pytest.raises(RuntimeError, match="ERR_NVGPUCTRPERM"):
        profile(CELL)


def test_a_missing_program_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ImportError, match="ncu was not found"):
        profile(CELL)


def test_launches_of_a_kernel_are_added_up(tmp_path, monkeypatch):
    shared = {
        "run": "2026-01-01", "gpu": "GPU", "driver": "1", "torch": "2", "triton": "3",
        "git_sha": "abc", "dirty": False, "pattern": "random", "kernel": "dhidden_kernel",
        "sm_ghz": 2.0, "issue_pct": 1.0, "l2_pct": 1.0, "dram_pct": 1.0, "dram_mib": 4.0,
        "stalls": {"barrier": 1.0, "wait": 2.0},
    }  # fmt: skip
    lines = [
        {**shared, "microseconds": 100.0, "tensor_pipe_pct": 10.0},
        {**shared, "microseconds": 300.0, "tensor_pipe_pct": 50.0},
    ]
    path = tmp_path / "gpu/head_profile.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    cells = [cell.strip() for cell in TABLES["profile"]().splitlines()[2].split("|")[1:-1]]
    expected = ["gradient of the hidden states", "random", "2", "400", "2.00", "40"]
    assert cells[:6] == expected
    assert cells[-2:] == ["8", "a fixed latency"]
