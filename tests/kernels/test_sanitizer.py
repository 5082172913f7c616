"""What runs under compute-sanitizer runs at all, and what the tool says is understood."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels import sanitizer

FAKE = """#!/bin/sh
case "$*" in
  *--run\\ planted*) echo "========= ERROR SUMMARY: $PLANTED"; exit $CODE;;
  *racecheck*) echo "========= RACECHECK SUMMARY: $HAZARDS displayed (0 errors, 0 warnings)";;
  *) echo "========= ERROR SUMMARY: 0 errors";;
esac
"""


@pytest.mark.parametrize("family", [name for name in sanitizer.FAMILIES if "planted" not in name])
def test_every_family_runs(family):
    torch.manual_seed(0)
    sanitizer.FAMILIES[family]()


@pytest.mark.parametrize(
    ("planted", "hazards", "right"),
    [("32 errors", "0 hazards", 5), ("0 errors", "0 hazards", 3), ("32 errors", "2 hazards", 4)],
    ids=["sound", "tools that do not look", "a race"],
)
def test_what_the_tool_finds_is_written_down(
    tmp_path, monkeypatch, capsys, planted, hazards, right
):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE)
    tool.chmod(0o755)
    for name, value in (("PATH", f"{tmp_path}:/usr/bin:/bin"), ("PLANTED", planted)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HAZARDS", hazards)
    monkeypatch.setenv("CODE", "0" if planted.startswith("0") else str(sanitizer.FAULTY))
    output = tmp_path / "sanitizer.jsonl"
    words = ["sanitizer", "--only", "sparse products", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        sanitizer.main()
    assert bool(ended.value.code) == (right < 5)
    assert f"{right} of 5 as they should be" in capsys.readouterr().out
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(record["family"], record["tool"]) for record in records] == [
        *(("sparse products", tool) for tool in sanitizer.TOOLS),
        ("planted write", "memcheck"),
        ("planted read", "initcheck"),
    ]
    assert records[1]["errors"] == int(hazards[0]) and "SUMMARY" in records[1]["said"][-1]
    assert {"seconds", "exit_code", "environment", "date"} <= records[0].keys()


def test_without_the_tool_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(tmp_path)))
    monkeypatch.setattr(sys, "argv", ["sanitizer"])
    with pytest.raises(SystemExit, match="compute-sanitizer is not on the PATH"):
        sanitizer.main()
