"""What a benchmark shows: a line for every cell, and a table at the end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

Record = dict[str, Any]
Columns = Mapping[str, Callable[[Record], str]]


def figure(key: str, form: str = "", scale: float = 1) -> Callable[[Record], str]:
    """Words of a record's field, times ``scale``; nothing where it has none."""
    return lambda record: f"{record[key] * scale:{form}}" if key in record else ""


mebibytes = figure("peak_bytes", ",.1f", 2**-20)


def timed_columns(**others: Callable[[Record], str]) -> Columns:
    """Columns of what timing.py measures, ``others`` behind the time."""
    clock = figure("sm_mhz", ".0f")
    return {"p50 ms": figure("p50_ms", ".4f"), **others, "MiB": mebibytes, "MHz": clock}


def timed_words(record: Record) -> str:
    """Median, quantiles and memory of what timing.py measured."""
    found = f"{record['p50_ms']:.4f} ms ({record['p20_ms']:.4f} to {record['p80_ms']:.4f})"
    return f"{found}, {mebibytes(record)} MiB" if "peak_bytes" in record else found


def in_words(columns: Columns, record: Record) -> str:
    """What the columns say of a record, in a line."""
    return ", ".join(f"{words(record)} {heading}" for heading, words in columns.items())


def describe(label: str, words: Callable[[Record], str], record: Record) -> str:
    """One line: what was found of a cell, what its gate refused or its error said, and how long
    that took."""
    found = words(record) if record["status"] == "ok" else record["status"]
    if record["status"] == "red_gate" and "errors" in record:
        judged = [(name, e, record["allowed"][name]) for name, e in record["errors"].items()]
        found += ": " + ", ".join(f"{n} {e:.2g} > {a:.2g}" for n, e, a in judged if not e <= a)
    error = f": {record['error']}" if "error" in record else ""
    return f"{label}: {found}{error}  [{record['cell_seconds']:.1f} s]"


def result_table(title: str, columns: Columns, records: Sequence[tuple[str, Record]]) -> Table:
    """A row for every label and record."""
    table = Table("cell", *columns, "status", title=title)
    for label, record in records:
        table.add_row(label, *(words(record) for words in columns.values()), record["status"])
    return table
