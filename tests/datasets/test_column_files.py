"""Parquet and Arrow files, and folders that `datasets` saved."""

from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparton.datasets.column_files import count_rows, read_rows
from sparton.datasets.files import DataFile, locate
from sparton.datasets.sources import text_records

ROWS = [{"query": "a", "pos": ["x"]}, {"query": "b", "pos": None}]
NAMES = {"parquet": "Parquet", "arrow": "Arrow"}


def write(path: Path, form: str, table: pa.Table) -> DataFile:
    if form == "parquet":
        pq.write_table(table, path)
    else:
        begin = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        with begin(str(path), table.schema) as file:
            file.write_table(table)
    return DataFile(str(path), path)


@pytest.mark.parametrize("written", ["parquet", "stream", "file"])
def test_rows_and_damage(written: str, tmp_path: Path) -> None:
    form = "parquet" if written == "parquet" else "arrow"
    path = tmp_path / f"a.{form}"
    file = write(path, written, pa.Table.from_pylist(ROWS))
    assert list(read_rows(file, form)) == [(1, ROWS[0]), (2, ROWS[1])]
    assert count_rows(file, form) == 2 and file.place(2) == f"{path}, row 2"
    twice = write(path, written, pa.table([["a"], ["b"]], names=["x", "x"]))
    with pytest.raises(ValueError, match=r"a column of \['x', 'x'\] occurs twice"):
        list(read_rows(twice, form))
    whole = path.read_bytes()
    for content in (whole[:-30], b"", b"no table"):
        path.write_bytes(content)
        for read in (lambda: list(read_rows(file, form)), lambda: count_rows(file, form)):
            with pytest.raises(ValueError, match=rf"{path}: not readable as {NAMES[form]} after"):
                read()


def test_many_batches_and_how_far_they_are(tmp_path: Path) -> None:
    table = pa.table({"query": [f"q {row}" for row in range(3000)]})
    for form in NAMES:
        file = write(tmp_path / f"a.{form}", form, table)
        told: list[int] = []
        rows = list(read_rows(file, form, told.append))
        assert rows[-1] == (3000, {"query": "q 2999"}) and len(rows) == 3000
        assert len(told) == 3 and told == sorted(told) and told[-1] == file.path.stat().st_size
        empty = write(tmp_path / f"b.{form}", form, table.slice(0, 0))
        assert list(read_rows(empty, form, told.append)) == [] and count_rows(empty, form) == 0


def test_a_folder_that_datasets_saved_is_a_file_of_examples(tmp_path: Path) -> None:
    pairs = {"question": [f"q {row}" for row in range(6)], "passage": ["a b"] * 6}
    saved = datasets.Dataset.from_dict(pairs)
    saved.shuffle(seed=0).save_to_disk(tmp_path / "saved", num_shards=2)
    found = locate("saved", root=str(tmp_path))
    assert [file.path.name[:10] for file in found] == ["data-00000", "data-00001"]
    records = text_records(str(tmp_path / "saved"), cache_dir=str(tmp_path / "cache"))
    assert len(records.table.rows) == 6
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"both holds the splits train, test: name one, as"):
        locate(str(tmp_path / "both"))
    assert len(locate(str(tmp_path / "both" / "test"))) == 1
    saved.select([]).save_to_disk(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="empty was saved without rows"):
        locate(str(tmp_path / "empty"))
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state\.json is not valid JSON"):
        locate(str(tmp_path / "saved"))
