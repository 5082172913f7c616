"""The pass over the files of a source that finds every fault before training starts."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np

from sparton.arguments import ArgumentError, refuse_below, refuse_other
from sparton.datasets.columns import Schema
from sparton.datasets.files import FORMATS, DataFile, RecordError, detect_format
from sparton.datasets.permutation import PART, derive_key, permute
from sparton.datasets.tables import Columns, count_records, open_table
from sparton.packing import ranges_of
from sparton.writing import failures_told

if TYPE_CHECKING:
    import pyarrow as pa

OnError = Literal["stop", "skip"]
Item = TypeVar("Item")

NAMED_REJECTIONS = 5
_STRETCH = 1 << 16  # records

logger = logging.getLogger(__name__)


class Reading(NamedTuple):
    """How the files of a source are read.

    Attributes:
        format: jsonl, tsv, csv, parquet or arrow; auto goes by each file's ending.
        columns: a mapping from names in the files, in the header of TSV and CSV, to the names that
            records use; for TSV and CSV without a header, the names of the columns in order.
        on_error: stop at a malformed record, or skip and count it.
        limit: size of the random part of the source that is taken; None for all.
        limit_seed: which part.
    """

    format: str = "auto"
    columns: Columns | None = None
    on_error: OnError = "stop"
    limit: int | None = None
    limit_seed: int = 0

    def check(self) -> None:
        """Raise ArgumentError for a setting that does not exist."""
        refuse_other(["auto", *FORMATS], format=self.format)
        refuse_other(get_args(OnError), on_error=self.on_error)
        refuse_below(1, limit=self.limit)


@dataclass
class Tally:
    """Counts of one preparation, and what happens to a malformed record."""

    on_error: OnError
    skipped: int = 0
    first_skipped: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)

    def describe(self, columns: str) -> None:
        """Note what the columns of a file were taken as."""
        if columns and columns not in self.columns:
            self.columns.append(columns)

    def reject(self, place: str, fault: Exception | str) -> None:
        """Stop with a message, or count the record that is at ``place``."""
        if self.on_error == "stop":
            raise ArgumentError(
                "{}: {}. Correct the record, or set {on_error} to leave such records out",
                place,
                fault,
                on_error="skip",
            )
        self.skipped += 1
        if len(self.first_skipped) < NAMED_REJECTIONS:
            self.first_skipped.append(f"{place}: {fault}")

    def facts(self) -> dict[str, Any]:
        return {
            "skipped": self.skipped,
            "first_skipped": self.first_skipped,
            "columns": self.columns,
        }


class Origin(Protocol):
    """What records are read from."""

    def place(self, number: int) -> str:
        """Where record ``number`` (from 1) is, for messages."""
        ...


class Placed(NamedTuple):
    """A parsed record and where it stands; written out only when a message needs it."""

    file: Origin
    number: int
    value: Any

    @property
    def place(self) -> str:
        return self.file.place(self.number)


def read_records(
    files: Sequence[DataFile],
    reading: Reading,
    parse: Callable[[Any], Any],
    tally: Tally,
    schema: Schema,
) -> Iterator[Placed]:
    """Every well-formed record of ``files`` after ``parse``, with a progress bar.

    With a limit the files are read twice: first to count their records. Those outside of the random
    part are neither decoded nor parsed.

    Args:
        files: read in this order.
        reading: format and policy.
        parse: raises RecordError for a malformed record. It is given a JSON value, a mapping from
            column names, or the list of a line's fields where columns have no names.
        tally: counts.
        schema: what columns may hold.
    """
    given = None if reading.format == "auto" else reading.format
    typed = [(file, given or detect_format(file)) for file in files]
    taken: Iterator[bool] = repeat(True)
    if reading.limit is not None:
        with _progress(files, "counting") as advance:
            total = sum(
                count_records(file, form, reading.columns, schema, partial(advance, file))
                for file, form in typed
            )
        taken = random_part(total, reading.limit, reading.limit_seed)
    with _progress(files, "preparing") as advance:
        for file, form in typed:
            table = open_table(file, form, reading.columns, schema, partial(advance, file))
            tally.describe(table.description)
            for (number, raw), take in zip(table.records, taken):
                if not take:
                    continue
                try:
                    value = parse(table.decode(raw))
                except RecordError as fault:
                    tally.reject(file.place(number), fault)
                    continue
                yield Placed(file, number, value)


def random_part(total: int, size: int, seed: int) -> Iterator[bool]:
    """For each of ``total`` records, whether it is one of ``size`` drawn without replacement.

    Nothing is held but a stretch of it: the records are those to which a permutation that ``seed``
    selects gives the lowest numbers.
    """
    for stretch in ranges_of(total, _STRETCH):
        numbers = permute(np.arange(stretch.start, stretch.stop), total, derive_key(seed, PART))
        yield from (numbers < size).tolist()


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Consecutive lists of ``size`` items, the last one shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def write_table(path: Path, schema: "pa.Schema", batches: Iterable["pa.RecordBatch"]) -> None:
    """Write an Arrow stream that `datasets` can map into memory."""
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            with failures_told(str(path), path):
                writer.write_batch(batch)


def report(name: str, rows: int, facts: Mapping[str, Any]) -> None:
    """Say how many records a source has, what its columns were taken as and, aloud, how many were
    left out."""
    columns = " | ".join(facts["columns"])
    logger.info("%s: %d records%s", name, rows, f" ({columns})" if columns else "")
    if repeated := facts.get("repeated"):
        logger.warning(
            "%s: left out %d negatives that are positives of their own records", name, repeated
        )
    if facts["skipped"]:
        logger.warning(
            "%s: skipped %d malformed records of %d; the first: %s",
            name,
            facts["skipped"],
            rows + facts["skipped"],
            "; ".join(facts["first_skipped"]),
        )


@contextmanager
def _progress(files: Sequence[DataFile], doing: str) -> Iterator[Callable[[DataFile, int], None]]:
    """A progress bar over the bytes of all files; told how far into one the reader is."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    sizes = {file: file.path.stat().st_size for file in files}
    before = dict(zip(sizes, accumulate(sizes.values(), initial=0)))
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(f"{doing} {files[0].path.name}", total=sum(sizes.values()))

        def advance(file: DataFile, position: int) -> None:
            bar.update(task, completed=before[file] + position, description=f"{doing} {file.name}")

        yield advance
