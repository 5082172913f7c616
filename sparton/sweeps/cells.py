"""One cell of a sweep: a run in a process of its own. However it ends, that is written down."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparton.training.processes import run_alone
from sparton.training.status import (
    FAILED,
    KILLED,
    RESULTS,
    Status,
    begin_run,
    end_run,
    failure_watch,
    read_status,
)

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
    before = read_status(folder)
    if before and before.state in RESULTS and _read_settings(folder) == settings:
        log.info("done already (%s): %s", before.state, folder)
        return before
    if not rank:
        begin_run(folder)
        (folder / CELL_FILE).write_text(json.dumps(settings) + "\n")
    ended = run_alone(command, failure_watch(folder))
    if rank and ended.code == 0:
        return None
    end_run(folder, Status(KILLED if ended.code < 0 else FAILED, f"the process {ended}"))
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
        return json.loads((folder / CELL_FILE).read_text())
    except (OSError, ValueError):
        return None
