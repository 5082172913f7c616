"""Folders of runs: gone again where nothing began in them, and the link to the latest."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LATEST = "latest"
_SIGNS = (".lock", "status.json", "manifest.json", "metrics.jsonl")  # of a run
# What it replaces, and takes for what one that was killed has left.
_LOST = ("model", "checkpoints", "results.json", "runs", "run.png", "*.tmp")
_RUNS = Path("runs")
log = logging.getLogger(__name__)


def existing(path: Path) -> Path:
    """The innermost folder of a path that is there."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def refuse_loss(folder: str) -> None:
    """Refuse the folder of a run in which somebody else's files would be written over, or removed
    as if a run that was killed had left them.

    Raises:
        ValueError: the folder has no name.
        FileExistsError: names one of the files.
    """
    if not folder:
        raise ValueError("hydra.run.dir is empty: name the folder of the run, or leave it out")
    place = Path(folder)
    if any((place / sign).exists() for sign in _SIGNS):
        return
    found = [each for pattern in _LOST for each in sorted(place.glob(pattern))]
    # An empty folder loses nothing: checkpoints/ may lead to a disk that is meant for them.
    lost = [each.name for each in found if not each.is_dir() or any(each.iterdir())]
    if lost:
        raise FileExistsError(
            f"{folder} has {lost[0]!r}, which no run has left there, and which would be lost: give "
            "the run a folder of its own, by name=... or hydra.run.dir=..."
        )


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
