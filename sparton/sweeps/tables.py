"""The records of a sweep as a table: what sets its cells apart, and what they measured."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rich.table import Table

from sparton.training.status import OK, OOM

Record = Mapping[str, Any]
_Form = Callable[[float], str]  # how a figure is written
PUBLISHED = "published"  # the status of what others measured and no cell did
PRINTED = "Memory is in GB there, as printed; examples/s follow from its steps and hours."
# What models are measured by, with the field of a record: on test tasks, or on dev tasks where a
# training has no others.
QUALITY = {"test NDCG@10": "test_ndcg@10", "dev NDCG@10": "dev_ndcg@10"}
_OWN_COLUMN = {"head", "batch", "gpus", "seed", "study", "data_dir"}


class Grid(NamedTuple):
    """``folders``: those of each row's cells, in that of the sweep; ``projected``: some times were
    not measured but follow from a rate."""

    header: list[str]
    rows: list[list[str]]
    folders: list[list[str]]
    projected: bool


def grid(records: Sequence[Record], examples: int | None, published: Sequence[Record]) -> Grid:
    """One row for each record, or for all those that differ in their seed alone and have a result;
    columns in which no row has a value are left out.

    Args:
        examples: of a whole training; its time is a column.
        published: figures to set in brackets behind those of the same head and batch; those that
            have no such cell are rows of their own, at the end.
    """
    rows = [[dict(record) | _hours(record, examples) for record in row] for row in _rows(records)]
    firsts = [row[0] for row in rows]
    theirs = [next((each for each in published if _same(first, each)), {}) for first in firsts]
    for alone in (each for each in published if each not in theirs):
        rows.append([])
        firsts.append({"head": alone["name"], "batch": alone.get("batch"), "gpus": ""})
        firsts[-1] |= {"variant": "", "status": PUBLISHED}
        theirs.append(alone)
    columns: dict[str, list[str]] = {"head": [first["head"] for first in firsts]}
    columns["batch"] = [f"{first['batch']:,}" if first["batch"] else "" for first in firsts]
    if len({record["gpus"] for record in records}) > 1:
        columns["gpus"] = [str(first["gpus"]) for first in firsts]
    if len({record["seed"] for record in records}) > 1:
        columns["seed"] = [", ".join(str(record["seed"]) for record in row) for row in rows]
    columns["settings"] = [first["variant"] for first in firsts]
    columns["status"] = [first["status"] for first in firsts]
    for name, (key, form, scale) in _measured(examples).items():
        columns[name] = [
            _with_brackets(_values(row, key, scale), _printed(other, key), form)
            for row, other in zip(rows, theirs, strict=True)
        ]
    projected = [first.get("projected", False) for first in firsts]
    times = columns.get(_time_name(examples), [])
    for number, estimate in enumerate(projected):
        times[number] = f"~{times[number]}" if estimate else times[number]
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    cells = [list(row) for row in zip(*columns.values())]
    folders = [[record["cell"] for record in row] for row in rows]
    return Grid(list(columns), cells, folders, any(projected))


def _rows(records: Sequence[Record]) -> list[list[Record]]:
    """The records that share a row, each with its ``variant``; seeds ascend."""
    rows: dict[tuple[Any, ...], list[Record]] = {}
    for number, (record, variant) in enumerate(zip(records, variants(records), strict=True)):
        asked = (each for each in record["overrides"] if not each.startswith("seed="))
        place: tuple[Any, ...] = (record["head"], record["batch"], record["gpus"], *sorted(asked))
        if record["status"] != OK:
            place = (number,)
        rows.setdefault(place, []).append({**record, "variant": variant})
    return [sorted(row, key=lambda record: record["seed"]) for row in rows.values()]


def _values(row: Sequence[Record], key: str, scale: float) -> list[float]:
    return [record[key] * scale for record in row if record.get(key) is not None]


def variants(records: Sequence[Record]) -> list[str]:
    """The overrides in which a record differs from others, but for those with their own column.

    A row of a table's experiment, ``+experiment/table3=...``, says no more than those columns."""
    shared = set.intersection(*(set(record["overrides"]) for record in records))
    texts = []
    for record in records:
        own = [each for each in record["overrides"] if each not in shared]
        keys = [each.split("=", 1)[0].lstrip("+~") for each in own]
        kept = [
            each
            for each, key in zip(own, keys, strict=True)
            if key not in _OWN_COLUMN and not key.startswith("experiment/")
        ]
        texts.append(" ".join(kept))
    return texts


def line_names(records: Sequence[Record]) -> list[str]:
    """What a record's cells share over all batches: head, number of GPUs if it varies, settings."""
    several = len({record["gpus"] for record in records}) > 1
    return [
        " ".join(filter(None, (record["head"], f"{record['gpus']} GPUs" * several, variant)))
        for record, variant in zip(records, variants(records), strict=True)
    ]


def largest_batches(records: Sequence[Record], examples: int | None) -> list[str]:
    """The largest batch that fit into memory, in words for each line, with the time of a training
    of so many examples; empty where memory never ran out."""
    if all(record["status"] != OOM for record in records):
        return []
    largest: dict[str, Record | None] = {}
    for name, record in zip(line_names(records), records, strict=True):
        best = largest.setdefault(name, None)
        if record["status"] == OK and (best is None or record["batch"] >= best["batch"]):
            largest[name] = record
    texts = []
    for name, best in largest.items():
        hours = ({} if best is None else _hours(best, examples)).get("hours")
        time = "" if hours is None else f" ({_duration(hours)})"
        texts.append(f"{name} {'none' if best is None else format(best['batch'], ',')}{time}")
    return texts


def with_folders(table: Grid) -> Grid:
    """The table in Markdown's terms with the folders of each row's cells as its last column."""
    folders = [", ".join(f"`{cell}`" for cell in row) for row in table.folders]
    rows = [[*row, cell] for row, cell in zip(table.rows, folders, strict=True)]
    return table._replace(header=[*table.header, "folder"], rows=rows)


def markdown(table: Grid) -> str:
    words = [column in ("head", "settings", "status", "folder") for column in table.header]
    rule = ["---" if word else "---:" for word in words]
    lines = ("| " + " | ".join(cells) + " |" for cells in (table.header, rule, *table.rows))
    return "\n".join(lines) + "\n"


def rich_table(table: Grid) -> Table:
    shown = Table()
    for column in table.header:
        words = column in ("head", "settings", "status")
        shown.add_column(column, justify="left" if words else "right")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _measured(examples: int | None) -> dict[str, tuple[str, _Form, float]]:
    """Columns of figures: their key in a record, format, and unit."""
    return {
        "steps": ("steps", "{:,.0f}".format, 1.0),
        "examples/s": ("examples_per_second", "{:,.0f}".format, 1.0),
        "ms/step": ("step_ms", "{:,.0f}".format, 1.0),
        "peak GiB": ("peak_memory_mib", "{:.1f}".format, 1 / 1024),
        _time_name(examples): ("hours", _duration, 1.0),
        **{name: (key, "{:.3f}".format, 1.0) for name, key in QUALITY.items()},
    }


def _time_name(examples: int | None) -> str:
    return f"time for {examples:,} examples" if examples else "time"


def _duration(hours: float) -> str:
    """In the largest unit of which there is one at least, or in seconds."""
    for unit, number in (("h", hours), ("min", 60 * hours)):
        if number >= 1:
            return f"{number:.3g} {unit}"
    return f"{3600 * hours:.3g} s"


def _hours(record: Record, examples: int | None) -> dict[str, Any]:
    """The hours that a training with so many examples would take at the rate of this shorter one;
    nothing where this one is not shorter."""
    rate = record.get("examples_per_second")
    if examples is None or rate is None or (record["steps"] + 1) * record["batch"] > examples:
        return {}
    return {"hours": examples / rate / 3600, "projected": True}


def _same(record: Record, published: Record) -> bool:
    """Whether a published row has the head and the batch of a cell."""
    return record["head"] in published["heads"] and record["batch"] == published["batch"]


def _printed(published: Record, key: str) -> float | None:
    """What a published row says of a record's field, in the unit of the column."""
    if key == "peak_memory_mib":
        return published.get("memory_gb")
    if key == "test_ndcg@10":
        return published.get("ndcg@10")
    if key == "examples_per_second" and {"steps", "hours"} <= published.keys():
        return published["steps"] * published["batch"] / published["hours"] / 3600
    return published.get(key)


def _with_brackets(own: Sequence[float], other: float | None, form: _Form) -> str:
    """The mean of a row's values and, where there are several, their standard deviation; behind it
    what was published."""
    texts = []
    if own:
        spread = form(stdev(own)) if len(own) > 1 else ""
        varies = spread not in ("", form(0))
        texts.append(f"{form(fmean(own))}{f' ± {spread}' if varies else ''}")
    if other is not None:
        texts.append(f"({form(other)})")
    return " ".join(texts)
