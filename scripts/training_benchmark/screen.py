"""What the benchmark shows while it runs, and at its end."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from head_benchmark.runner import outcome
from training_benchmark.suites import Cell, expected_seconds

Record = dict[str, Any]
PROFILE_SECONDS = 60.0
COLUMNS = {
    "pairs/s": ("examples_per_second_p50", ",.0f"),
    "step ms": ("step_ms_p50", ".1f"),
    "wait ms": ("data_wait_ms", ".1f"),
    "GiB": ("peak_allocated_gib", ".1f"),
    "reserved": ("peak_reserved_gib", ".1f"),
    "MFU": ("mfu", ".1%"),
    "start s": ("seconds_to_first_step", ".0f"),
    "recompiled": ("recompilations_after_warm_up", "d"),
    "loss": ("loss_first", ".3f"),
    "last": ("loss_last", ".3f"),
}
PROFILE_COLUMNS = {
    "step ms": ("step_ms", ".1f"),
    "busy": ("busy_share", ".1%"),
    "idle ms": ("idle_ms", ".2f"),
    "ceiling": ("matrix_ceiling_share", ".1%"),
    "launches": ("launches", ".0f"),
    "waits": ("host_waits", ".1f"),
    "to host": ("copies_to_host", ".1f"),
}


def cell_of(record: Record) -> Cell:
    return Cell(**{field: record[field] for field in Cell._fields})


def describe(cell: Cell, record: Record) -> str:
    """One line: what was found of a cell, or why nothing was, and how long that took."""
    found = record["status"]
    if "examples_per_second_p50" in record and found == "ok":
        low, middle, high = (record[f"examples_per_second_p{q}"] for q in (20, 50, 80))
        found = f"{middle:,.0f} pairs/s ({low:,.0f} to {high:,.0f})"
    if "peak_allocated_gib" in record:
        found += f", {record['peak_allocated_gib']:.1f} GiB"
    if "busy_share" in record:
        found = f"{record['step_ms']:.1f} ms, GPU busy {record['busy_share']:.1%}; ms: "
        spent = sorted(record["families_ms"].items(), key=lambda item: -item[1])
        found += ", ".join(f"{family} {ms:.1f}" for family, ms in spent if ms)
    said = {key: record[key] for key in ("error", "cell_seconds") if key in record}
    return outcome(cell.label, found, {"status": "", **said})


def result_table(suite: str, records: Sequence[Record]) -> Table:
    profiled = any("busy_share" in record for record in records)
    columns = PROFILE_COLUMNS if profiled else COLUMNS
    table = Table("cell", *columns, "status", title=suite)
    for record in records:
        figures = [
            f"{record[key]:{form}}" if key in record else "" for key, form in columns.values()
        ]
        table.add_row(cell_of(record).label, *figures, record["status"])
    return table


def list_cells(suite: str, cells: Sequence[Cell], seconds: float | None, console: Console) -> None:
    """The cells and about how long they take; ``seconds`` of each, None for a profile."""
    total = 0.0
    for cell in cells:
        each = PROFILE_SECONDS if seconds is None else expected_seconds(cell, seconds)
        total += each
        console.print(f"  {cell.label}, about {each:.0f} s", highlight=False)
    console.print(f"{suite}: {len(cells)} cells, about {total:.0f} s")
