"""Files and folders that are there whole or not at all."""

import gzip
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path

from safetensors import SafetensorError

_COMPRESSION = 6


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """A file to write beside ``path`` that takes its place when complete; the folder is made.

    It is flushed to the disk before the renaming.

    Args:
        path: of the file.
        shared: whether other processes may write the same file meanwhile: each writes beside it
            under a name of its own.

    Raises:
        OSError: the disk is full or not writable; names the file and the room left. What was at
            ``path`` before is untouched.
    """
    own = f".{uuid.uuid4().hex[:8]}" if shared else ""
    fresh = path.with_name(f"{path.name}{own}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield fresh
        _flush(fresh)
        fresh.replace(path)
    except OSError as error:
        raise _not_written(str(path), path, error) from error
    finally:
        with suppress(OSError):
            fresh.unlink()


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``path`` when the block ends without an error.

    Everything is flushed before the renaming. An existing folder at ``path`` is replaced; if the
    process dies between the two renames, its content stays beside ``path`` under a name that ends
    in ``.old``.

    Raises:
        OSError: the disk is full or not writable; names the folder and the room left. What was at
            ``path`` before is untouched.
    """
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        for part in (*fresh.rglob("*"), fresh):
            _flush(part)
        _replace(path, fresh)
    except Exception as error:
        # A failed write is an OSError, a SafetensorError, or a bare Exception of tokenizers.
        if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:
            raise
        raise _not_written(f"the folder {path}", path, error) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def sweep_leftovers(folder: Path) -> None:
    """Remove what writers that died have left in a folder, where nobody writes any more.

    A folder that :func:`replacing_folder` had moved aside, and had not replaced, is put back.
    """
    newest_first = sorted(
        folder.glob(".*.old"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    for path in newest_first:
        before = folder / path.name[1 : -len(".01234567.old")]
        if path.is_dir() and not before.exists():
            path.rename(before)
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink()


@contextmanager
def writing(file: Path, *, compress: bool) -> Iterator[BufferedIOBase]:
    """Bytes to a file, gzipped if wanted; the same bytes make the same file at any time."""
    with file.open("wb") as sink:
        if not compress:
            yield sink
            return
        with gzip.GzipFile("", "wb", _COMPRESSION, sink, mtime=0) as packed:
            yield packed


def _not_written(what: str, path: Path, error: Exception) -> OSError:
    existing = next(each for each in path.absolute().parents if each.is_dir())
    free = shutil.disk_usage(existing).free / 2**20
    return OSError(
        f"{what} could not be written; {free:,.1f} MiB are free in {existing}. Make room and run "
        f"the same command again; what was there before is untouched. ({error})"
    )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, fresh: Path) -> None:
    old = fresh.with_suffix(".old")
    existed = path.exists()
    if existed:
        path.rename(old)
    try:
        fresh.rename(path)
    except OSError:
        if existed:
            old.rename(path)
        raise
    if existed:
        shutil.rmtree(old)
