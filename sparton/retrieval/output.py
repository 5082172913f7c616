"""Result files that are there whole or not at all."""

import gzip
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path

_COMPRESSION = 6


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside ``path`` that takes its place when complete; the folder is made.

    Raises:
        OSError: the disk is full or not writable; names the file and the room left. What was at
            ``path`` before is untouched.
    """
    fresh = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield fresh
        fresh.replace(path)
    except OSError as error:
        existing = next(each for each in path.absolute().parents if each.is_dir())
        free = shutil.disk_usage(existing).free / 2**20
        raise OSError(
            f"{path} could not be written; {free:,.1f} MiB are free in {existing}. Make room and "
            f"run the same command again ({error})"
        ) from error
    finally:
        with suppress(OSError):
            fresh.unlink()


@contextmanager
def writing(file: Path, *, compress: bool) -> Iterator[BufferedIOBase]:
    """Bytes to a file, gzipped if wanted; the same bytes make the same file at any time."""
    with file.open("wb") as sink:
        if not compress:
            yield sink
            return
        with gzip.GzipFile("", "wb", _COMPRESSION, sink, mtime=0) as packed:
            yield packed
