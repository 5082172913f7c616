"""Tables are built once, whole or not at all."""

import errno
import fcntl
import json
import logging
import os
import pickle
import threading
import time
from pathlib import Path

import filelock
import pyarrow as pa
import pytest

from sparton.datasets import store
from sparton.datasets.files import DataFile
from sparton.datasets.preparation import write_table
from sparton.datasets.store import FACTS, TABLE, Facts, fingerprint, stored_table


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
    times = path.stat()
    path.unlink()
    path.write_text("y")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint([file], limit=None) != first, "another of the same size and time"
    path.write_text("xy")
    assert fingerprint([file], limit=None) != first


def flip(path: Path, place: int = -40) -> None:
    """Change one bit; size and time of the file stay what they were."""
    content, times = bytearray(path.read_bytes()), path.stat()
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def change_fact(path: Path) -> None:
    stored = json.loads(path.read_text())
    stored["facts"]["skipped"] = 7
    path.write_text(json.dumps(stored))


DAMAGE = {
    "one bit": (TABLE, flip, "table.arrow has another content than was written"),
    "cut short": (TABLE, lambda path: os.truncate(path, 100), "has 100 bytes in the place of"),
    "no table": (TABLE, Path.unlink, "table.arrow is missing"),
    "another file": ("index.npy", flip, "index.npy has another content"),
    "no facts": (FACTS, Path.unlink, "its facts.json"),
    "facts that are no JSON": (FACTS, lambda path: path.write_text("[" * 100_000), "its facts"),
    "facts of another form": (FACTS, lambda path: path.write_text('["a"]'), "its facts.json"),
    "other facts": (FACTS, change_fact, "its facts.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_table_is_named_and_prepared_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    builds: list[Path] = []

    def build(folder: Path) -> Facts:
        builds.append(folder)
        (folder / "index.npy").write_bytes(bytes(100))
        return write_numbers(folder)

    whole = stored_table("mine", "key", build, str(tmp_path))
    assert stored_table("mine", "key", build, str(tmp_path))[2:] == whole[2:] and len(builds) == 1
    name, harm, message = DAMAGE[damage]
    harm(whole.folder / name)
    again = stored_table("mine", "key", build, str(tmp_path))
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"mine: the prepared table in {whole.folder} is damaged: ")
    assert message in said and said.endswith("it is prepared again") and len(builds) == 2
    assert again.rows["number"].to_pylist() == [1, 2, 3] and again.facts == {"skipped": 0}
    assert sorted(each.name for each in (tmp_path / "sparton").iterdir()) == ["key", "key.lock"]


def test_content_is_that_of_the_rows_alone(tmp_path: Path) -> None:
    def of(key: str, *numbers: int) -> str:
        def build(folder: Path) -> Facts:
            batch = pa.record_batch({"number": numbers})
            write_table(folder / TABLE, batch.schema, [batch])
            return {"name": key}

        return stored_table("mine", key, build, str(tmp_path)).content

    assert of("a", 1, 2) == of("b", 1, 2) != of("c", 2, 1)


def test_waiting_for_another_process_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_PATIENCE", 0.05)
    (tmp_path / "sparton").mkdir()
    lock = (tmp_path / "sparton/key.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    timer = threading.Timer(0.5, lock.close)
    timer.start()
    with caplog.at_level(logging.INFO):
        stored_table("mine", "key", write_numbers, str(tmp_path))
    timer.join()
    assert caplog.messages[0] == "mine: waits for another process that prepares it"


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever is slower takes what another process has built."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def build(folder: Path) -> Facts:
        if len(builds) < 2:
            builds.append(folder)
            stored_table("other", "key", build, str(tmp_path))
        return write_numbers(folder)

    builds: list[Path] = []
    monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    assert len(stored_table("mine", "key", build, str(tmp_path)).rows) == 3
    assert "cannot be locked ([Errno 37] No locks available)" in caplog.text
    assert [each.name for each in (tmp_path / "sparton").iterdir()] == ["key"]
