"""Memory-mapped Arrow tables made from files once and kept in the cache of `datasets`."""

import errno
import gc
import hashlib
import json
import logging
import shutil
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparton.datasets.files import DataFile
from sparton.digests import Seal, texts_digest
from sparton.reading import read_json

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

LAYOUT_VERSION = 8
TABLE, FACTS = "table.arrow", "facts.json"

Facts = dict[str, Any]
Build = Callable[[Path], Facts]

_PATIENCE = 2.0  # seconds to wait for another process without a word
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


class Lookup:
    """Single rows of a memory-mapped table, four times as fast as ``rows[i]`` gives them."""

    def __init__(self, rows: "Dataset") -> None:
        self._rows = rows
        self._batches = rows.data.to_batches()
        self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]

    def __reduce__(self) -> tuple:
        return Lookup, (self._rows,)  # which another process finds by its path

    def __getitem__(self, row: int) -> "list[pa.Scalar]":
        """The cells of one row, not yet made objects of Python."""
        number = bisect_right(self._starts, row) - 1
        place = row - self._starts[number]
        return [column[place] for column in self._batches[number].columns]


class StoredTable(NamedTuple):
    """A table on disk.

    Attributes:
        rows: memory-mapped, in Arrow format; a worker process shares its pages.
        row: ``row[i]`` is the list of cells of row i.
        facts: what the conversion found out, as JSON values.
        folder: where the table lies, with whatever else was built beside it.
        content: a digest of the rows.
    """

    rows: "Dataset"
    row: Lookup
    facts: Facts
    folder: Path
    content: str


class DamagedTableError(ValueError):
    """A table on disk is not as it was written."""


def fingerprint(files: Sequence[DataFile], **settings: Any) -> str:
    """A key that changes with any file's path, size or times, and with any setting. (What takes the
    place of a file may be given its size and the time when it was written.)"""
    states = []
    for file in files:
        stat = file.path.stat()
        times = [stat.st_mtime_ns, stat.st_ctime_ns]
        states.append([file.name, str(file.path.resolve()), stat.st_size, *times])
    content = json.dumps([LAYOUT_VERSION, states, settings], sort_keys=True, default=repr)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def stored_table(name: str, key: str, build: Build, cache_dir: str | None = None) -> StoredTable:
    """The table of ``key``, built now if this machine does not have it yet, or has it damaged.

    Sizes and digests of all its files are verified. Several processes may ask at once; one builds
    and the others wait. A build that stops half-way leaves nothing behind that a later one would
    take for whole.

    Args:
        name: of the source, for the log.
        key: from :func:`fingerprint`.
        build: writes ``table.arrow`` into the folder it is given and returns its facts.
        cache_dir: by default the cache folder of `datasets` (environment HF_DATASETS_CACHE).

    Raises:
        DamagedTableError: a table that was built just now cannot be read as it was written.
    """
    from datasets import Dataset, config

    cache = Path(cache_dir or config.HF_DATASETS_CACHE) / "sparton"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / key
    try:
        facts, content = _verified(folder)
    except (FileNotFoundError, DamagedTableError):
        with _turn(name, folder) as alone:
            if not _is_whole(name, folder):  # no other process has built it meanwhile
                _build_whole(name, folder, build, alone)
        facts, content = _verified(folder)
    rows = Dataset.from_file(str(folder / TABLE)).with_format("arrow")
    return StoredTable(rows, Lookup(rows), facts, folder, content)


def _verified(folder: Path) -> tuple[Facts, str]:
    """The facts of a table, all of whose files are as they were written, and a digest of its rows.

    Raises:
        FileNotFoundError: there is no such folder.
        DamagedTableError: says what is wrong with it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        stored = read_json(folder / FACTS)
        facts, files = stored["facts"], stored["files"]
        seals = {name: Seal(*seal) for name, seal in files.items()}
        whole = stored["digest"] == _digest(facts, files) and TABLE in seals
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise DamagedTableError(f"the prepared table in {folder} is damaged: its {FACTS}")
    for name, seal in seals.items():
        if fault := seal.fault(folder / name):
            raise DamagedTableError(f"the prepared table in {folder} is damaged: {fault}")
    return facts, seals[TABLE].digest


def _digest(facts: Facts, files: dict[str, Any]) -> str:
    return texts_digest([json.dumps([facts, files], sort_keys=True)])


def _is_whole(name: str, folder: Path) -> bool:
    """Whether there is a table; a damaged one is told of and removed."""
    try:
        _verified(folder)
    except FileNotFoundError:
        return False
    except DamagedTableError as error:
        logger.warning("%s: %s; it is prepared again", name, error)
        shutil.rmtree(folder)
        return False
    return True


@contextmanager
def _turn(name: str, folder: Path) -> Iterator[bool]:
    """Wait until no other process builds the table. Gives whether that is so: some file systems
    have no locks."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_suffix(".lock"))
    try:
        try:
            lock.acquire(timeout=_PATIENCE)
        except Timeout:
            logger.warning("%s: waits for another process that prepares it", name)
            lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "%s: %s cannot be locked (%s): each of several processes prepares all of it. A cache "
            "elsewhere is set by HF_DATASETS_CACHE", name, folder.parent, error,
        )  # fmt: skip
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _build_whole(name: str, folder: Path, build: Build, alone: bool) -> None:
    if alone:
        for left in folder.parent.glob(f"{folder.name}*.partial"):
            shutil.rmtree(left, ignore_errors=True)
    partial = folder.with_suffix(f".{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    started = time.perf_counter()
    # Millions of short-lived rows make the collector walk everything that was imported, again and
    # again, for nothing: half of the time of a build.
    gc.freeze()
    try:
        facts = json.loads(json.dumps(build(partial)))
        files = {each.name: list(Seal.of(each)) for each in sorted(partial.iterdir())}
        stored = {"facts": facts, "files": files, "digest": _digest(facts, files)}
        (partial / FACTS).write_text(json.dumps(stored))
        try:
            partial.replace(folder)
        except OSError:
            if alone or not folder.is_dir():
                raise  # else another process was faster
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        gc.unfreeze()
    logger.info("%s: prepared in %.1f s, kept in %s", name, time.perf_counter() - started, folder)
