"""Files that hold records by columns: Parquet, and Arrow as `datasets` saves it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparton.datasets.files import Advance, DataFile

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_PER_BATCH = 1024
_ARROW_FILE = b"ARROW1"  # how one begins that is no stream


class _Content(NamedTuple):
    """What a file holds, read batch by batch."""

    names: list[str]
    num_rows: int
    batches: "Iterator[pa.RecordBatch]"


def read_rows(
    file: DataFile, form: str, advance: Advance | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number (from 1) and columns of every row.

    Args:
        file: where they are.
        form: one of :data:`COLUMN_FORMATS`.
        advance: is told the bytes read from disk.

    Raises:
        ValueError: a damaged file.
    """
    number = 0
    with _told(file, form, lambda: number), COLUMN_FORMATS[form](file.path) as content:
        if len(set(content.names)) < len(content.names):
            raise ValueError(f"a column of {content.names} occurs twice")
        for batch in content.batches:
            for row in batch.to_pylist():
                number += 1
                yield number, row
            if advance:
                advance(file.path.stat().st_size * number // max(content.num_rows, 1))


def count_rows(file: DataFile, form: str) -> int:
    """How many rows a file says it has.

    Raises:
        ValueError: a damaged file.
    """
    with _told(file, form, lambda: 0), COLUMN_FORMATS[form](file.path) as content:
        return content.num_rows


@contextmanager
def _told(file: DataFile, form: str, row: Callable[[], int]) -> Iterator[None]:
    """Errors say which file is damaged, and after which row."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        # Dates that Python does not have, texts that are not UTF-8.
        raise ValueError(
            f"{file.name}: not readable as {form.title()} after row {row()} ({error}): get the "
            "file again"
        ) from error


@contextmanager
def _parquet(path: Path) -> Iterator[_Content]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as table:
        batches = table.iter_batches(batch_size=_ROWS_PER_BATCH)
        yield _Content(table.schema_arrow.names, table.metadata.num_rows, batches)


@contextmanager
def _arrow(path: Path) -> Iterator[_Content]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as raw:
        whole = raw.read(len(_ARROW_FILE)) == _ARROW_FILE
        raw.seek(0)
        # Of a mapped file, a table takes no memory.
        table = (pa.ipc.open_file if whole else pa.ipc.open_stream)(raw).read_all()
        batches = iter(table.to_batches(max_chunksize=_ROWS_PER_BATCH))
        yield _Content(table.schema.names, table.num_rows, batches)


COLUMN_FORMATS = {"parquet": _parquet, "arrow": _arrow}
