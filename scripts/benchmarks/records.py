"""Files of records, one JSON object per line, and the rules by which a run goes on with one."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.screen import Record
from benchmarks.study import C, Cell, Study
from sparton.training.loggers import whole_lines
from sparton.training.manifest import describe_environment

ROOT = Path(__file__).resolve().parents[2]
# What may change between the first and the last cell of a run.
CHANGING = ("suite", "command", "dirty", "run")
# What another attempt may change.
RETRIED = ("failed", "crashed", "timeout", "absent")


def record_environment(on_gpu: bool) -> Record:
    """Fields that all records of a run share; a tree without git names no commit."""
    found = describe_environment()
    git = found["git"] or {"sha": None, "dirty": None}
    return {
        "command": found["command"],
        "git_sha": git["sha"],
        "dirty": git["dirty"],
        "gpu": found["hardware"].get("gpu", "cpu") if on_gpu else "cpu",
        "driver": found["hardware"].get("driver"),
        "python": found["python"],
        "torch": found["packages"]["torch"],
        "triton": found["packages"]["triton"],
    }


def code_digest() -> str:
    """Twelve digits that other code, or another torch, does not have."""
    digest = hashlib.sha256(torch.__version__.encode())
    folders = (ROOT / "scripts/benchmarks", ROOT / "sparton")
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def folder_of(gpu: str) -> str:
    """The name below results/ for a device."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def read_records(path: Path) -> list[Record]:
    """Records of a file; a last line that a kill cut off is left out."""
    return [json.loads(line) for line in whole_lines(path)]


def write_records(path: Path, records: Iterable[Record]) -> None:
    """The file anew, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(_lines(records), encoding="utf-8")
    unfinished.replace(path)


def append_records(path: Path, records: Iterable[Record]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_lines(records))


def _lines(records: Iterable[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def cell_of(study: Study[C], record: Record) -> C:
    return study.cell(*(record[field] for field in study.fields()))


def records_of_run(study: Study[Any], suite: str, path: Path) -> list[Record]:
    """The records of a file that are of one run with a suite's."""
    records = read_records(path)
    return [r for r in records if r["suite"] == suite] if study.suites_apart else records


def discard(study: Study[Any], suites: Collection[str], path: Path) -> None:
    """Rid a file of the runs of these suites."""
    records = read_records(path) if study.suites_apart else []
    write_records(path, [record for record in records if record["suite"] not in suites])


def resume(study: Study[Any], path: Path, context: Record, asked: Collection[Cell]) -> None:
    """Rid a file of what is measured again: a torn line, and cells asked for that failed.

    Args:
        context: what every record of a suite says.

    Raises:
        SystemExit: records of the suite's run come from other code or another machine, or cannot be
            told from such. The file is left as it is.
    """
    records = records_of_run(study, context["suite"], path)
    for record in records:
        _check_same_run(path, record, context)
    again = [r for r in records if r["status"] in RETRIED and cell_of(study, r) in asked]
    write_records(path, [record for record in read_records(path) if record not in again])


def _check_same_run(path: Path, record: Record, context: Record) -> None:
    remedy = "name another file with --output, or measure all of it again with --fresh"
    for key, value in context.items():
        if key not in CHANGING and record.get(key, value) != value:
            raise SystemExit(
                f"{path} was measured with {key} = {record[key]}, this is {value}: {remedy}"
            )
    for whose, code in (("its code", record), ("this code", context)):
        if code["git_sha"] is None or code["dirty"]:
            what = "changes that no commit names" if code["git_sha"] else "no known commit"
            raise SystemExit(
                f"{path} holds records, but {whose} has {what}, so that it may be other code: "
                f"{remedy}"
            )
