"""Folders of runs: gone again where nothing began in them, and the link to the latest."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LATEST = "latest"
_RUNS = Path("runs")
log = logging.getLogger(__name__)


def existing(path: Path) -> Path:
    """The innermost folder of a path that is there."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


@contextmanager
def kept_if_begun(folder: Path, found: Path) -> Iterator[None]:
    """A run's folder in which no training has begun by the end of the block is removed, and so are
    the folders around it that are empty then, but for what was there before.

    Args:
        found: the innermost part of the path that was there before the run.
    """
    try:
        yield
    finally:
        begun = (folder / "metrics.jsonl").exists()
        made = [
            each for each in (folder, *folder.parents) if each != found and found in each.parents
        ]
        if made and not begun:
            shutil.rmtree(folder, ignore_errors=True)
            for around in made[1:]:
                with suppress(OSError):  # others have put something there
                    around.rmdir()


def mark_latest(folder: Path) -> None:
    """Let ``runs/latest`` lead to the run that has begun last, where its folder is in ``runs``."""
    runs = _RUNS.resolve()
    if runs not in folder.resolve().parents:
        return
    link, staged = runs / LATEST, runs / f".{LATEST}.{os.getpid()}"
    if link.exists() and not link.is_symlink():
        log.warning("%s does not lead to this run: it is no link, but somebody's own", link)
        return
    try:
        staged.symlink_to(folder.resolve().relative_to(runs), target_is_directory=True)
        staged.replace(link)
    except OSError as error:  # a file system without links
        log.warning("%s does not lead to this run: %s", link, error)
        staged.unlink(missing_ok=True)
