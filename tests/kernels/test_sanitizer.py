"""What runs under compute-sanitizer runs at all, and what the tool says is understood."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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


@pytest.mark.parametrize(
    ("number", "name", "function"),
    [
        (0, "_segment_max_hopper_kernel", "_segment_max_hopper_kernel"),
        (1, "_linear_hopper_kernel", "_linear_hopper_kernel"),
        (2, "_attention_hopper_kernel", "_attention_hopper_kernel"),
        (3, "_dquery_hopper_kernel", "_dquery_hopper_kernel"),
        (3, "_dkey_hopper_kernel", "_dkey_hopper_kernel"),
        (4, "_attention_hopper_kernel", "specialise"),
    ],
)
def test_reads_that_triton_adds_are_told_from_races_of_ours(number, name, function):
    file = sanitizer.SPECIALISED[number]
    lines = file.read_text().splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if text.startswith(f"def {function}("))
    reported = "========= Error: Race reported between {} access at {}+0x160 in {}:{}\n"
    beside = "=========     and {} access at {}+0xf300 in {}:{} [8 hazards]\n"
    read, elsewhere = (name, file.name, line), (name, file.name, line + 14)
    own = reported.format("Read", *read) + beside.format("Write", *elsewhere)
    turned = reported.format("Write", *elsewhere) + beside.format("Read", *read)
    others = [
        reported.format("Read", *elsewhere),
        reported.format("Read", *read) + beside.format("Read", *elsewhere),
        reported.format("Write", *read) + beside.format("Write", *read),
        reported.format("Read", "_segment_max_kernel", "portable.py", line),
    ]
    assert sanitizer.handshakes(own + turned) == 2
    assert sanitizer.handshakes("".join(others)) == 0
    ended = {"family": "splade head", "exit_code": sanitizer.FAULTY, "handshakes": 2}
    assert sanitizer.is_right({**ended, "errors": 2})
    assert not sanitizer.is_right({**ended, "errors": 3})


def test_products_are_written_into_zeros(monkeypatch):
    left, right, total = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)

    def products() -> list[Tensor]:
        return [left @ right, torch.addmm(total, left, right), F.linear(left, right.T)]

    def counted(self: Tensor, *shape: int, **options: torch.dtype) -> Tensor:
        filled.append(shape)
        return new_zeros(self, *shape, **options)

    expected, filled, new_zeros = products(), [], Tensor.new_zeros
    monkeypatch.setattr(Tensor, "new_zeros", counted)
    with sanitizer.products_into_zeros():
        found = products()
    assert filled == [(3, 5)] * 3
    assert all(map(torch.equal, found, expected))
    products()
    assert len(filled) == 3


def test_without_the_tool_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(tmp_path)))
    monkeypatch.setattr(sys, "argv", ["sanitizer"])
    with pytest.raises(SystemExit, match="compute-sanitizer is not on the PATH"):
        sanitizer.main()
