"""What the cells of a sweep came to: ``sweep.jsonl``, a table, and a figure beside them."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from sparton.reading import read_json
from sparton.sweeps.cells import find_cells
from sparton.sweeps.tables import (
    PRINTED,
    QUALITY,
    Grid,
    grid,
    largest_batches,
    line_names,
    markdown,
    rich_table,
    with_folders,
)
from sparton.training.figures import training_figures
from sparton.training.status import FAILED, KILLED, OK, RUNNING
from sparton.writing import replacing

log = logging.getLogger(__name__)
Record = dict[str, Any]
_UNFINISHED = (FAILED, KILLED, RUNNING)
_WIDE = 140  # columns at least: narrower terminals wrap lines, and no figure is cut off


class Published(NamedTuple):
    """Figures to compare with, by head and batch.

    Attributes:
        source: where they were published, and on what hardware.
        rows: each with the ``name`` that it has there, the ``heads`` that it stands beside, and of
            ``batch``, ``steps``, ``hours``, ``memory_gb`` and ``ndcg@10`` those that are known.
    """

    source: str
    rows: Sequence[Record]


def write_report(
    folder: Path, examples: int | None = None, published: Published | None = None
) -> int:
    """Read every cell below ``folder``, write the report there and show its table.

    Args:
        examples: of a whole training, for which each cell's time is given.

    Returns:
        How many cells have no result.

    Raises:
        ValueError: there are no cells.
    """
    records = write_records(folder)
    if not records:
        raise ValueError("no cell has left anything there")
    table, notes = tabulate(records, examples, published)
    from sparton.sweeps.figure import draw  # matplotlib, which no other command needs

    figure = draw(records, folder / "sweep.svg")
    picture = f"![throughput, memory and NDCG@10 over batch]({figure.name})\n" if figure else ""
    text = f"# Sweep\n\n`{folder}`\n\n{in_markdown(with_folders(table), notes)}\n{picture}"
    (folder / "sweep.md").write_text(text)
    console = Console(width=max(Console().width, _WIDE))
    console.print(rich_table(table))
    for line in (*notes, f"report: {folder / 'sweep.md'}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return sum(record["status"] in _UNFINISHED for record in records)


def write_records(folder: Path) -> list[Record]:
    """Read every cell below ``folder``, and write ``sweep.jsonl`` there if there are any."""
    records = read_records(folder)
    if records:
        with replacing(folder / "sweep.jsonl", shared=True) as fresh:
            fresh.write_text("".join(json.dumps(each, sort_keys=True) + "\n" for each in records))
    return records


def tabulate(
    records: Sequence[Record], examples: int | None = None, published: Published | None = None
) -> tuple[Grid, list[str]]:
    """The table of a report, and what it leaves open in one note after the other."""
    table = grid(records, examples, published.rows if published else ())
    return table, _notes(records, table, examples, published)


def in_markdown(table: Grid, notes: Sequence[str]) -> str:
    return "\n".join([markdown(table), *(f"{note}\n" for note in notes)])


def read_published(paper: Path, table: str) -> Published:
    """A table of ``results/paper.json``."""
    printed = json.loads(paper.read_text())
    rows = printed[table]["rows"]
    return Published(f"{printed[table]['conditions']} ({printed['source']})", rows)


def read_records(folder: Path) -> list[Record]:
    """One record for each cell: its settings and status, what it measured, and where."""
    records = []
    for cell, settings, status in find_cells(folder):
        record = {"cell": str(cell.relative_to(folder)), **settings}
        record |= {"status": status.state, "message": status.message}
        if status.state == OK:
            record |= training_figures(cell / "metrics.jsonl") | _quality(cell / "results.json")
        record["environment"] = _read(cell / "manifest.json") or None
        records.append(record)
    return sorted(records, key=lambda record: (record["head"], record["batch"], record["cell"]))


def _read(path: Path) -> Record:
    """What a file of a cell holds; nothing where it is not there or damaged, which is told."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        log.warning("%s is left out of the report: %s", path, error)
        return {}


def _quality(path: Path) -> Record:
    """NDCG@10 over all tasks of the split, "test" or "dev", on which the model was tested, and all
    metrics of each task; nothing where there was none."""
    results = _read(path)
    if not results:
        return {}
    tasks = {task["name"]: task["metrics"] for task in results["tasks"]}
    return {f"{results['split']}_ndcg@10": results["mean"]["ndcg@10"], "tasks": tasks}


def _notes(
    records: Sequence[Record], table: Grid, examples: int | None, published: Published | None
) -> list[str]:
    """What the table leaves open: how to read it, the largest batches, why cells have no result."""
    notes = []
    if any("±" in cell for row in table.rows for cell in row):
        notes.append("±: mean and standard deviation over the seeds.")
    for name, key in QUALITY.items():
        tasks = dict.fromkeys(", ".join(each["tasks"]) for each in records if key in each)
        if tasks:
            notes.append(f"{name}: mean over {' or, of other cells, '.join(tasks)}.")
    if table.projected:
        notes.append("~ projected from the measured rate.")
    if published:
        derived = any("steps" in row for row in published.rows)
        notes.append(f"In brackets: {published.source}.{f' {PRINTED}' if derived else ''}")
    if largest := largest_batches(records, examples):
        notes.append(f"Largest batch that fit: {', '.join(largest)}.")
    several = len({record["seed"] for record in records}) > 1
    for name, record in zip(line_names(records), records, strict=True):
        if record["status"] in _UNFINISHED:
            seed = f", seed {record['seed']}" if several else ""
            cell = f"{name}, batch {record['batch']:,}{seed}"
            notes.append(f"{cell}: {record['status']}: {record['message']}")
    if any(record["status"] in _UNFINISHED for record in records):
        notes.append("The same command goes on with the cells that have no result.")
    return notes
