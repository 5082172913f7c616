"""Finding files and reading their lines; damage is named with file and line."""

import gzip
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from sparton.datasets.files import (
    DataFile,
    RecordError,
    decode_text,
    detect_format,
    locate,
    read_lines,
)
from sparton.datasets.values import decode_json


def data_file(path: str | Path) -> DataFile:
    return DataFile(str(path), Path(path))


def test_lines_keep_their_numbers_and_lose_only_their_endings(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbffirst\r\n\n  \nsecond \n\tthird"
    expected = [(1, b"first"), (4, b"second "), (5, b"\tthird")]
    for name, stored in (("plain", content), ("packed", gzip.compress(content))):
        (tmp_path / name).write_bytes(stored)
        assert list(read_lines(data_file(tmp_path / name))) == expected


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_gzip_members_one_after_the_other_are_one_file(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparton.datasets.files.CHUNK", chunk)
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a\nb\n") + gzip.compress(b"c\n") + bytes(20))
    assert [line for _, line in read_lines(data_file(path))] == [b"a", b"b", b"c"]


def test_cut_gzip_gives_every_whole_line_and_names_the_last(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b"".join(b"line %d\n" % number for number in range(1, 100_001)))
    path.write_bytes(whole[: len(whole) // 2])
    lines = read_lines(data_file(path))
    read: list[bytes] = []
    with pytest.raises(ValueError, match=f"{path}: the gzip data is .*get the file again") as error:
        for _, line in lines:
            read.append(line)
    assert len(read) > 10_000 and read[-1] == b"line %d" % len(read)
    assert f"after line {len(read)} " in str(error.value)


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b"".join(b"line %d\n" % number for number in range(100_000)))
    half = len(whole) // 2
    path.write_bytes(whole[:half] + bytes(64) + whole[half + 64 :])
    with pytest.raises(ValueError, match=rf"{path}: the gzip data is .* after line \d+"):
        list(read_lines(data_file(path)))


def test_bytes_read_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"0123456789\n" * 5000)
    positions: list[int] = []
    list(read_lines(data_file(path), positions.append))
    assert positions == sorted(positions) and positions[-1] == path.stat().st_size


def test_faults_of_a_line() -> None:
    with pytest.raises(RecordError, match=r"byte 0xe9 at column 4 .*iconv"):
        decode_text("caf\xe9".encode("latin1"))
    with pytest.raises(RecordError, match=r"not JSON \(one record per line .* at column 4"):
        decode_json(b"[1,")
    with pytest.raises(RecordError, match="half of a surrogate pair"):
        decode_json(rb'["a", "\ud83d"]')
    assert decode_json(rb'["\ud83d\ude00", "\ud55c"]') == ["\U0001f600", "한"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", "jsonl"),
        ("b.json.gz", "jsonl"),
        ("c.tsv.gz", "tsv"),
        ("d.parquet", "parquet"),
        ("data-00000-of-00001.arrow", "arrow"),
        ("e.csv.gz", "csv"),
    ],
)
def test_formats(name: str, expected: str) -> None:
    assert detect_format(data_file(name)) == expected
    assert detect_format(data_file(name.upper())) == expected


def test_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"ending '\.xlsx' .* convert or rename it to one of \.jsonl"
    ):
        detect_format(data_file("a.xlsx"))


def test_locate_in_a_folder(write_lines: Callable[..., str], tmp_path: Path) -> None:
    for name in ("in/b.tsv", "in/a.tsv", "in/c.jsonl"):
        write_lines(["x"], name)
    root = str(tmp_path / "in")
    assert [file.path.name for file in locate("*.tsv", root=root)] == ["a.tsv", "b.tsv"]
    assert [file.path.name for file in locate(["c.jsonl", "a.tsv"], root=root)] == [
        "c.jsonl",
        "a.tsv",
    ]
    assert locate(f"{root}/c.jsonl")[0].path.name == "c.jsonl"
    with pytest.raises(ValueError, match=r"a\.tsv is named 2 times: leave all names but one out"):
        locate(["*.tsv", "a.tsv"], root=root)
    with pytest.raises(FileNotFoundError, match=r"d\.tsv: no such file.*holds a\.tsv, b\.tsv, c"):
        locate("d.tsv", root=root)
    with pytest.raises(ValueError, match=r"files=\[\]: name a file, or several"):
        locate([], root=root)
    with pytest.raises(FileNotFoundError, match=r"in is a folder: name its files, as .*/in/\*"):
        locate("in", root=str(tmp_path))
    (tmp_path / "beir").mkdir()
    (tmp_path / "beir/corpus.jsonl").write_text("")
    with pytest.raises(
        FileNotFoundError, match=r"not of examples .* sparton mine --beir .*/beir d"
    ):
        locate("beir", root=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"\. is a folder: name its files, as \*\.jsonl"):
        locate(".")
    with pytest.raises(FileNotFoundError, match="Without a root it comes from x/y"):
        locate("d.tsv", root=str(tmp_path), hub="x/y")
    with pytest.raises(FileNotFoundError, match="nowhere does not exist: give the root"):
        locate("d.tsv", root=f"{root}/nowhere")


def test_patterns_of_folders_and_folders_named_like_patterns(tmp_path: Path) -> None:
    names = ["a/x.tsv", "b/x.tsv", "b/._x.tsv", "[ab]*/x.tsv", "[ab]*/[x].tsv"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    def found(name: str, root: Path = tmp_path) -> list[str]:
        return [str(file.path.relative_to(root)) for file in locate(name, root=str(root))]

    everything = ["[ab]*/[x].tsv", "[ab]*/x.tsv", "a/x.tsv", "b/x.tsv"]
    assert found("?/*.tsv") == ["a/x.tsv", "b/x.tsv"]
    assert found("**/*.tsv") == everything
    assert found("[ab]*/*.tsv") == everything[:2]
    assert found("*.tsv", tmp_path / "[ab]*") == ["[x].tsv", "x.tsv"]
    assert found("[x].tsv", tmp_path / "[ab]*") == ["[x].tsv"]
    assert [file.path for file in locate(f"{tmp_path}/?/x*")] == [
        tmp_path / "a/x.tsv",
        tmp_path / "b/x.tsv",
    ]
    with pytest.raises(
        FileNotFoundError, match=r"c\*/x\.tsv: no such file\. The folder .*c\* does"
    ):
        found("c*/x.tsv")


def test_hub_files_go_through_datasets_and_keep_their_names(
    monkeypatch: pytest.MonkeyPatch, write_lines: Callable[..., str]
) -> None:
    asked: list[str] = []
    blob = write_lines(["x"], "0f3a")

    def download(self: datasets.DownloadManager, url: str) -> str:
        asked.append(url)
        if "missing" in url:
            raise OSError("404")
        return blob

    monkeypatch.setattr(datasets.DownloadManager, "download", download)
    (file,) = locate("pairs.jsonl.gz", hub="owner/data")
    assert asked == ["hf://datasets/owner/data/pairs.jsonl.gz"]
    assert file.place(3) == "owner/data/pairs.jsonl.gz, line 3" and str(file.path) == blob
    assert detect_format(file) == "jsonl"
    with pytest.raises(ConnectionError, match=r"missing\.tsv could not .*set root to a local"):
        locate("missing.tsv", hub="owner/data")
    assert locate(blob, root="/", hub="owner/data")[0].name == blob


def test_a_name_is_found_with_gz_at_its_end(tmp_path: Path) -> None:
    packed = tmp_path / "a.tsv.gz"
    packed.write_bytes(gzip.compress(b"x\ty\n"))
    (found,) = locate("a.tsv", root=str(tmp_path))
    assert found == data_file(packed)
    assert detect_format(found) == "tsv"
    (tmp_path / "a.tsv").write_bytes(b"plain\tfirst\n")
    assert locate("a.tsv", root=str(tmp_path)) == [data_file(tmp_path / "a.tsv")]
    with pytest.raises(FileNotFoundError, match=r"a: no such file\. The folder holds a\.tsv, a\."):
        locate("a", root=str(tmp_path))
