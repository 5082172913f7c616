"""Memory-mapped Arrow tables made from files once and kept in the cache of `datasets`."""

import gc
import hashlib
import json
import logging
import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparton.datasets.files import DataFile

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

LAYOUT_VERSION = 4
TABLE, FACTS = "table.arrow", "facts.json"

Facts = dict[str, Any]
Build = Callable[[Path], Facts]

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
    """

    rows: "Dataset"
    row: Lookup
    facts: Facts
    folder: Path


def fingerprint(files: Sequence[DataFile], **settings: Any) -> str:
    """A key that changes with any file's path, size or time, and with any setting."""
    states = [
        [file.name, str(file.path.resolve()), (stat := file.path.stat()).st_size, stat.st_mtime_ns]
        for file in files
    ]
    content = json.dumps([LAYOUT_VERSION, states, settings], sort_keys=True, default=repr)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def stored_table(name: str, key: str, build: Build, cache_dir: str | None = None) -> StoredTable:
    """The table of ``key``, built now if this machine does not have it yet.

    Several processes may ask at once; one builds and the others wait. A build that stops half-way
    leaves nothing behind that a later one would take for whole.

    Args:
        name: of the source, for the log.
        key: from :func:`fingerprint`.
        build: writes ``table.arrow`` into the folder it is given and returns its facts.
        cache_dir: by default the cache folder of `datasets` (environment HF_DATASETS_CACHE).
    """
    from datasets import Dataset, config
    from filelock import FileLock

    cache = Path(cache_dir or config.HF_DATASETS_CACHE) / "sparton"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / key
    with FileLock(cache / f"{key}.lock"):
        if not folder.is_dir():
            _build_whole(name, folder, build)
    rows = Dataset.from_file(str(folder / TABLE)).with_format("arrow")
    return StoredTable(rows, Lookup(rows), json.loads((folder / FACTS).read_text()), folder)


def _build_whole(name: str, folder: Path, build: Build) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    started = time.perf_counter()
    # Millions of short-lived rows make the collector walk everything that was imported, again and
    # again, for nothing: half of the time of a build.
    gc.freeze()
    try:
        facts = build(partial)
        (partial / FACTS).write_text(json.dumps(facts))
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        gc.unfreeze()
    logger.info("%s: prepared in %.1f s, kept in %s", name, time.perf_counter() - started, folder)
