"""Identifiers of texts in a file of Arrow's format, read in place."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from sparton.datasets.preparation import chunks, write_table
from sparton.digests import Seal
from sparton.writing import replacing

_ROWS_PER_BATCH = 1 << 16


class Ids(Sequence[str]):
    """Identifiers by row, of which none is in memory until it is asked for.

    Args:
        files: in order.
        deleted: rows that are passed over, ascending; int64.
    """

    def __init__(self, files: Sequence[Path], deleted: NDArray[np.int64]) -> None:
        import pyarrow as pa

        batches: list[pa.RecordBatch] = []
        for file in files:
            batches += pa.ipc.open_stream(pa.memory_map(str(file))).read_all().to_batches()
        self._arrays = [batch.column(0) for batch in batches]
        self._starts = np.cumsum([0, *map(len, self._arrays)])
        self._deleted = deleted
        # Deleted row i has this many rows before it that are kept.
        self._kept_before = deleted - np.arange(len(deleted))

    def __len__(self) -> int:
        return int(self._starts[-1]) - len(self._deleted)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        stored = row + int(np.searchsorted(self._kept_before, row, side="right"))
        number = int(np.searchsorted(self._starts, stored, side="right")) - 1
        return self._arrays[number][stored - int(self._starts[number])].as_py()

    def __iter__(self) -> Iterator[str]:
        deleted = set(self._deleted.tolist())
        return (identifier for row, identifier in self.stored() if row not in deleted)

    def stored(self) -> Iterator[tuple[int, str]]:
        """Row and identifier of all texts, deleted ones included."""
        for start, array in zip(self._starts.tolist(), self._arrays, strict=False):
            yield from enumerate(array.to_pylist(), start)


def write_ids(path: Path, ids: Iterable[str]) -> Seal:
    """Write identifiers; the same ones make the same file. Several processes may do so at once."""
    import pyarrow as pa

    schema = pa.schema([("id", pa.string())])
    with replacing(path, shared=True) as fresh:
        batches = (
            pa.record_batch([pa.array(some, pa.string())], schema=schema)
            for some in chunks(ids, _ROWS_PER_BATCH)
        )
        write_table(fresh, schema, batches)
        return Seal.of(fresh)
