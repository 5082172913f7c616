"""The pass over the files of a source that finds every fault before training starts."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from sparton.arguments import ArgumentError
from sparton.datasets.files import (
    DataFile,
    RecordError,
    decode_json,
    decode_text,
    detect_format,
    read_lines,
    read_parquet,
)

if TYPE_CHECKING:
    import pyarrow as pa

OnError = Literal["stop", "skip"]
Columns = Sequence[str] | Mapping[str, str]
Item = TypeVar("Item")

NAMED_REJECTIONS = 5
_LONGEST_SHOWN = 100  # characters of a record

logger = logging.getLogger(__name__)


class Reading(NamedTuple):
    """How the files of a source are read.

    Attributes:
        format: jsonl, tsv or parquet; auto goes by each file's ending.
        columns: a mapping from names in the files, in the header of TSV, to the names that
            records use; for TSV without a header, the names of the columns in order.
        on_error: stop at a malformed record, or skip and count it.
        limit: records taken from the start of the source; None for all.
    """

    format: str = "auto"
    columns: Columns | None = None
    on_error: OnError = "stop"
    limit: int | None = None

    def check(self) -> None:
        """Raise ValueError for a setting that does not exist."""
        if self.format not in ("auto", "jsonl", "tsv", "parquet"):
            raise ValueError(f"format={self.format!r} must be auto, jsonl, tsv or parquet")
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f"on_error={self.on_error!r} must be 'stop' or 'skip'")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} must be at least 1")


@dataclass
class Tally:
    """Counts of one preparation, and what happens to a malformed record."""

    on_error: OnError
    kept: int = 0
    skipped: int = 0
    first_skipped: list[str] = field(default_factory=list)

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
        return {"skipped": self.skipped, "first_skipped": self.first_skipped}


class Placed(NamedTuple):
    """A parsed record and where it stands; written out only when a message needs it."""

    file: DataFile
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
    *,
    is_header: Callable[[Sequence[str]], bool] = lambda fields: False,
) -> Iterator[Placed]:
    """Every well-formed record of ``files`` after ``parse``, with a progress bar.

    Args:
        files: read in this order.
        reading: format and policy.
        parse: raises RecordError for a malformed record. It is given a JSON value, a mapping from
            column names, or the list of a line's fields where TSV columns have no names.
        tally: counts.
        is_header: tells whether the first line of a TSV file holds its column names.
    """
    with _progress(files) as advance:
        for file in files:
            for number, raw, decode in _raw_records(file, reading, is_header, advance):
                try:
                    value = parse(decode(raw))
                except RecordError as fault:
                    tally.reject(file.place(number), fault)
                    continue
                tally.kept += 1
                yield Placed(file, number, value)
                if tally.kept == reading.limit:
                    return


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
            writer.write_batch(batch)


def report(name: str, rows: int, facts: Mapping[str, Any]) -> None:
    """Say how many records a source has and, aloud, how many were left out."""
    logger.info("%s: %d records", name, rows)
    if facts["skipped"]:
        logger.warning(
            "%s: skipped %d malformed records of %d; the first: %s",
            name,
            facts["skipped"],
            rows + facts["skipped"],
            "; ".join(facts["first_skipped"]),
        )


def _raw_records(
    file: DataFile,
    reading: Reading,
    is_header: Callable[[Sequence[str]], bool],
    advance: Callable[[DataFile, int], None],
) -> Iterator[tuple[int, Any, Callable[[Any], Any]]]:
    """Number and raw form of each record, and the function that decodes it or finds its fault."""
    form = detect_format(file) if reading.format == "auto" else reading.format
    names = reading.columns if isinstance(reading.columns, Mapping) else None
    decode: Callable[[Any], Any] = partial(_rename, names=names)
    if form == "parquet":
        for number, row in read_parquet(file, partial(advance, file)):
            yield number, row, decode
        return
    lines = read_lines(file, partial(advance, file))
    if form == "jsonl":
        decode = partial(_decode_object, names=names) if names else decode_json
    else:
        lines, decode = _tsv(file, lines, reading.columns, is_header)
    for number, line in lines:
        yield number, line, decode


def _tsv(
    file: DataFile,
    lines: Iterator[tuple[int, bytes]],
    columns: Columns | None,
    is_header: Callable[[Sequence[str]], bool],
) -> tuple[Iterator[tuple[int, bytes]], Callable[[bytes], Any]]:
    """The lines below a header, if there is one, and the function that splits them."""
    renamed = columns if isinstance(columns, Mapping) else {}
    names = list(columns) if columns and not renamed else None
    first = next(lines, None)
    if first is None:
        return lines, decode_text
    number, fields = first[0], first[1].decode(errors="replace").split("\t")
    if renamed and not any(field in renamed for field in fields):
        raise ValueError(
            f"{file.place(number)}: none of {list(renamed)}, which columns renames, is in the "
            f"header {fields}; without a header: columns=[query,positive,...], a list of all"
        )
    if names is None and (renamed or is_header(fields)):
        names = fields
    if fields == names:
        return lines, partial(_split, names=[renamed.get(name, name) for name in names])
    shown = shorten(" | ".join(fields), _LONGEST_SHOWN)
    logger.info("%s: no header, its first record is: %s", file.name, shown)
    return chain([first], lines), partial(_split, names=names)


def _split(line: bytes, names: Sequence[str] | None) -> list[str] | dict[str, str]:
    fields = decode_text(line).split("\t")
    if names is None:
        return fields
    if len(fields) != len(names):
        raise RecordError(f"{len(fields)} tab-separated fields, {len(names)} expected: {names}")
    return dict(zip(names, fields))


def _decode_object(line: bytes, names: Mapping[str, str]) -> Any:
    return _rename(decode_json(line), names)


def _rename(record: Any, names: Mapping[str, str] | None) -> Any:
    if not names or not isinstance(record, dict):
        return record
    return {names.get(key, key): value for key, value in record.items()}


@contextmanager
def _progress(files: Sequence[DataFile]) -> Iterator[Callable[[DataFile, int], None]]:
    """A progress bar over the bytes of all files; told how far into one the reader is."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    sizes = {file: file.path.stat().st_size for file in files}
    before = dict(zip(sizes, accumulate(sizes.values(), initial=0)))
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(f"preparing {files[0].path.name}", total=sum(sizes.values()))

        def advance(file: DataFile, position: int) -> None:
            bar.update(
                task, completed=before[file] + position, description=f"preparing {file.name}"
            )

        yield advance
