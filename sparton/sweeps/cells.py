"""One cell of a sweep: a run in a process of its own. However it ends, that is written down."""

import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sparton.reading import read_json
from sparton.training.outcome import termination_noted
from sparton.training.processes import run_alone
from sparton.training.status import (
    FAILED,
    KILLED,
    RESULTS,
    RUN,
    Status,
    begin_run,
    end_run,
    failure_watch,
    only_writer,
    read_status,
    run_name,
)
from sparton.writing import replacing

CELL_FILE = "cell.json"
Settings = dict[str, Any]
log = logging.getLogger(__name__)


def run_cell(
    command: Sequence[str], folder: Path, settings: Settings, rank: int | None = None
) -> Status | None:
    """Run ``command`` and leave ``cell.json`` and ``status.json`` in ``folder``.

    A cell that is done with a result, running out of memory included, is not run again; one that
    was killed goes on from its checkpoint, and one that failed is tried again.

    Args:
        command: trains in ``folder``.
        settings: of the cell, as the report shows them. Other ones than those that ``folder`` was
            left with make it another cell.
        rank: of this process, where several start the ranks of one cell.

    Returns:
        How the cell ended, None where that is for another rank to say.
    """
    try:
        with nullcontext() if rank else only_writer(folder):
            return _run_cell(command, folder, settings, rank)
    except BlockingIOError as error:  # whose cell it is will tell of it
        log.warning("left out: %s", error)
        return Status(FAILED, str(error))


def _run_cell(
    command: Sequence[str], folder: Path, settings: Settings, rank: int | None
) -> Status | None:
    before = read_status(folder)
    if before and before.state in RESULTS and _read_settings(folder) == settings:
        log.info("done already (%s): %s", before.state, folder)
        return before
    run = run_name()
    if not rank:
        begin_run(folder, run)
        with replacing(folder / CELL_FILE) as fresh:
            fresh.write_text(json.dumps(settings) + "\n")
    with nullcontext() if rank else termination_noted(folder, run):
        ended = run_alone(command, failure_watch(folder, run), {RUN: run})
    if rank and ended.code == 0:
        return None
    end_run(folder, run, Status(KILLED if ended.code < 0 else FAILED, f"the process {ended}"))
    status = read_status(folder) or Status(FAILED, f"{folder} has no status that can be read")
    log.info("%s: %s", status.state, folder)
    return status


def find_cells(folder: Path) -> list[tuple[Path, Settings, Status]]:
    """Folder, settings and status of every cell below a folder."""
    cells = []
    for path in sorted(folder.rglob(CELL_FILE)):
        settings, status = _read_settings(path.parent), read_status(path.parent)
        if settings is not None and status is not None:
            cells.append((path.parent, settings, status))
    return cells


def _read_settings(folder: Path) -> Settings | None:
    try:
        return read_json(folder / CELL_FILE)
    except (OSError, ValueError):
        return None
