"""Files and folders that are there whole or not at all."""

import errno
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

    It has the permissions of any new file, whoever writes it, and is flushed to the disk before the
    renaming.

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
    with failures_told(str(path), path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
            fresh.touch()
            allowed = fresh.stat().st_mode
            yield fresh
            fresh.chmod(allowed)
            _flush(fresh)
            fresh.replace(path)
        finally:
            with suppress(OSError):
                fresh.unlink()


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``path`` when the block ends without an error.

    All files have the permissions of a new file, and everything is flushed before the renaming. An
    existing folder at ``path`` is replaced; if the
    process dies between the two renames, its content stays beside ``path`` under a name that ends
    in ``.old``.

    Raises:
        OSError: there is a file at ``path``, or the disk is full or not writable; names the folder
            and the room left. What was at ``path`` before is untouched.
    """
    path = path.resolve()  # "." has a name, too, and a link stays one
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file: name a folder")
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with failures_told(f"the folder {path}", path):
        try:
            fresh.mkdir(parents=True)
            yield fresh
            allowed = fresh.stat().st_mode & 0o666  # those of a file, without the right to enter
            for part in (*fresh.rglob("*"), fresh):
                if part.is_file():
                    part.chmod(allowed)  # safetensors' are their owner's alone
                _flush(part)
            _replace(path, fresh)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def failures_told(what: str, path: Path) -> Iterator[None]:
    """Say of a write that fails within what could not be written, why, and what to do.

    Args:
        what: is written.
        path: where it will be.

    Raises:
        OSError: in the place of one that says less, and of those of other libraries.
    """
    try:
        yield
    except Exception as error:
        # A failed write is an OSError, a SafetensorError, or a bare Exception of tokenizers.
        if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:
            raise
        raise OSError(
            f"{what} could not be written; {room(path, error)} and run the same command again; "
            f"what was there before is untouched. ({error})"
        ) from error


def room(path: Path, error: BaseException) -> str:
    """What keeps a disk from taking a file at ``path``, of which an error tells, and what to do
    about it."""
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "files may not be so large here. Raise that limit (ulimit -f), or name another place"
    folder = next(each for each in path.absolute().parents if each.is_dir())
    if not os.access(folder, os.W_OK):
        return f"{folder} is read-only here. Make it writable"
    disk = shutil.disk_usage(folder)
    if not disk.total:  # such as /proc
        return f"{folder} keeps no files. Name another place"
    return f"{disk.free / 2**20:,.1f} MiB are free in {folder}. Make room"


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
