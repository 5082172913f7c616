"""Records as the tables read them, and the words that say where they come from."""

import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.records import read_records as read_file

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
FIGURES = ROOT / "docs/figures"
Record = dict[str, Any]
Build = Callable[[list[Record]], str]
NOT_MEASURED = "Not measured yet: `python scripts/benchmark.py {}`.\n"
# By the name that a page calls it.
TABLES: dict[str, Callable[[], str]] = {}


def read_records(study: str) -> list[Record]:
    """Records of a study from every device."""
    return [record for records in read_devices(study) for record in records]


def read_devices(study: str) -> list[list[Record]]:
    """Records of a study, device by device."""
    return [read_file(folder / f"{study}.jsonl") for folder in device_folders(study)]


def device_folders(study: str) -> list[Path]:
    """Folders of the devices that the study was measured on, the paper's card first; an empty file
    is no measurement."""
    files = RESULTS.glob(f"*/{study}.jsonl")
    measured = (path.parent for path in files if path.read_text(encoding="utf-8").strip())
    return sorted(measured, reverse=True)


def drawings(study: str, name: str, words: str) -> str:
    """The figures of every device as a page in docs/ shows them; nothing where none was drawn."""
    names = [f"{name}-{folder.name}.svg" for folder in device_folders(study)]
    return "".join(f"![{words}](figures/{n})\n\n" for n in names if (FIGURES / n).exists())


def paper(table: str) -> Any:
    """What the paper printed."""
    return json.loads((RESULTS / "paper.json").read_text())[table]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; nothing where it has no rows."""
    if not rows:
        return ""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(
    name: str,
    study: str,
    suite: str | None = None,
    command: str | None = None,
    together: str | None = None,
) -> Callable[[Build], Build]:
    """Makes a table of what builds one of the records of a device.

    Args:
        name: in :data:`TABLES`.
        study: the name of the records' files.
        suite: only its records, which are a run of their own.
        command: what measures them, behind ``scripts/benchmark.py``; by default the study's name.
        together: records with the same value of this field are compared with one another and with
            no others; by default all are.
    """

    def register(build: Build) -> Build:
        TABLES[name] = partial(by_device, study, build, suite, command or study, together)
        return build

    return register


def by_device(
    study: str,
    build: Build,
    suite: str | None = None,
    command: str = "",
    together: str | None = None,
) -> str:
    """The table of every device whose records fill a row, each under its caption.

    Raises:
        ValueError: records of several runs that are compared with one another.
    """
    tables = []
    for folder in device_folders(study):
        records = read_file(folder / f"{study}.jsonl")
        records = [r for r in records if suite is None or r["suite"] == suite]
        if records:
            for compared in {record[together] if together else None for record in records}:
                runs = {r["run"] for r in records if not together or r[together] == compared}
                if len(runs) > 1:
                    raise ValueError(f"{folder}/{study}.jsonl mixes the runs {sorted(runs)}")
            built = build(records)
            tables += [f"{built}\n{caption(records)}\n"] if built else []
    return "\n".join(tables) or NOT_MEASURED.format(command)


def caption(records: Sequence[Record]) -> str:
    """Card, software, commits, days, and the conditions that the card was under."""
    first = records[0]
    parts = [first["gpu"], f"driver {first['driver']}", f"torch {first['torch']}"]
    rivals = first.get("versions", {}).get("sentence-transformers")
    parts += [f"sentence-transformers {rivals}"] if rivals else []
    parts += [f"triton {first['triton']}", *dict.fromkeys(map(_origin, records))]
    for key, form in (("sm_mhz", "{:,.0f} MHz"), ("power_w", "{:.0f} W")):
        if values := [record[key] for record in records if key in record]:
            parts.append(f"median of the cells {form.format(statistics.median(values))}")
    return f"<sub>{'; '.join(parts)}</sub>\n"


def _origin(record: Record) -> str:
    """The commit and the day."""
    return f"{_commit(record['git_sha'], record['dirty'])}; {record['run'][:10]}"


def run_caption(*environments: Record) -> str:
    """Of the manifests of runs on one device: card or processor, software, commits."""
    hardware, packages = (environments[0][key] for key in ("hardware", "packages"))
    parts = [hardware.get("gpu") or hardware.get("cpu", "CPU")]
    parts += [f"driver {hardware['driver']}"] if hardware.get("driver") else []
    parts += [f"{name} {packages[name]}" for name in ("torch", "triton") if name in packages]
    gits = [environment["git"] or {} for environment in environments]
    parts += dict.fromkeys(_commit(git.get("sha"), git.get("dirty")) for git in gits)
    return f"<sub>{'; '.join(parts)}</sub>\n"


def _commit(sha: str | None, dirty: object) -> str:
    commit = f"commit {sha[:9]}" if sha else "no commit known"
    return f"{commit}, modified" if dirty else commit


def find(records: Sequence[Record], cell: Any = None, **wanted: Any) -> Record:
    """The record with the fields of a cell and these, {} where there is none."""
    wanted |= cell._asdict() if cell else {}
    return next((r for r in records if all(r[key] == x for key, x in wanted.items())), {})


def milliseconds(record: Record) -> str:
    """Three significant digits; what happened where there is no time."""
    if "p50_ms" not in record:
        return record.get("status", "").replace("oom", "OOM")
    time = record["p50_ms"]
    return f"{time:.2f}" if time < 10 else f"{time:.1f}" if time < 1000 else f"{time:,.0f}"


def mebibytes(record: Record, key: str = "peak_bytes") -> str:
    return f"{record[key] / 2**20:,.0f}" if key in record else ""


def gibibytes(record: Record) -> str:
    return f"{record['total_peak_bytes'] / 2**30:.2f}" if "total_peak_bytes" in record else ""


def bold(head: str) -> str:
    """Ours stands out among the heads."""
    return f"**{head}**" if head == "sparton" else head


def beside(own: str, printed: Any) -> str:
    """Our figure, and the paper's in brackets."""
    return own if printed is None else f"{own} ({printed})".strip()
