"""Memory-mapped Arrow tables made from files once and kept in the cache of `datasets`."""

import gc
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparton.datasets.files import DataFile

if TYPE_CHECKING:
    from datasets import Dataset

LAYOUT_VERSION = 1
TABLE, FACTS = "table.arrow", "facts.json"

Facts = dict[str, Any]
Build = Callable[[Path], Facts]

logger = logging.getLogger(__name__)


class StoredTable(NamedTuple):
    """A table on disk.

    Attributes:
        rows: memory-mapped; a worker process shares its pages. In Arrow format: ``rows[i]`` is a
            table of one row, found without walking through the batches before it.
        facts: what the conversion found out, as JSON values.
        folder: where the table lies, with whatever else was built beside it.
    """

    rows: "Dataset"
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
    return StoredTable(rows, json.loads((folder / FACTS).read_text()), folder)


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
