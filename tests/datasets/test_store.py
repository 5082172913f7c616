"""Tables are built once, whole or not at all."""

import errno
import pickle
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest

from sparton.datasets.files import DataFile
from sparton.datasets.preparation import write_table
from sparton.datasets.store import TABLE, Facts, fingerprint, stored_table


def write_numbers(folder: Path) -> Facts:
    batch = pa.record_batch({"number": [1, 2, 3]})
    write_table(folder / TABLE, batch.schema, [batch])
    return {"skipped": 0}


def test_one_of_several_builds_and_the_others_wait(tmp_path: Path) -> None:
    builds: list[Path] = []
    lengths: list[int] = []

    def build(folder: Path) -> Facts:
        builds.append(folder)
        time.sleep(0.2)
        return write_numbers(folder)

    def ask() -> None:
        lengths.append(len(stored_table("mine", "key", build, str(tmp_path)).rows))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [3] * 4 and len(builds) == 1


def test_a_full_disk_leaves_nothing_and_the_next_build_starts_afresh(tmp_path: Path) -> None:
    def fill(folder: Path) -> Facts:
        write_numbers(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        stored_table("mine", "key", fill, str(tmp_path))
    assert [each.name for each in (tmp_path / "sparton").iterdir()] == ["key.lock"]
    assert len(stored_table("mine", "key", write_numbers, str(tmp_path)).rows) == 3


def test_what_a_killed_build_left_is_not_taken_for_a_table(tmp_path: Path) -> None:
    left = tmp_path / "sparton" / "key.partial"
    left.mkdir(parents=True)
    (left / TABLE).write_bytes(b"half a table")
    assert len(stored_table("mine", "key", write_numbers, str(tmp_path)).rows) == 3


def test_single_rows_are_those_of_the_table_in_every_process(tmp_path: Path) -> None:
    lengths = [3, 1, 4, 2]
    rows = [{"text": f"text {row}", "list": [row] * (row % 3)} for row in range(sum(lengths))]
    schema = pa.schema([("text", pa.string()), ("list", pa.list_(pa.int64()))])

    def build(folder: Path) -> Facts:
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        parts = [rows[start : start + length] for start, length in zip(starts, lengths)]
        batches = [pa.RecordBatch.from_pylist(part, schema) for part in parts]
        write_table(folder / TABLE, schema, batches)
        return {}

    table = stored_table("mine", "key", build, str(tmp_path))
    sent = pickle.dumps(table.row)
    assert len(sent) < 5000, "the path and not the table is sent"
    for lookup in (table.row, pickle.loads(sent)):
        found = [[cell.as_py() for cell in lookup[row]] for row in range(len(rows))]
        assert found == [list(row.values()) for row in rows]
    with pytest.raises(IndexError):
        table.row[len(rows)]


def test_fingerprints_follow_files_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("x")
    file = DataFile("a", path)
    first = fingerprint([file], limit=None)
    assert fingerprint([file], limit=None) == first
    assert fingerprint([file], limit=3) != first
    assert fingerprint([file, file], limit=None) != first
    path.write_text("xy")
    assert fingerprint([file], limit=None) != first
