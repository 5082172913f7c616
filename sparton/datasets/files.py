"""Data files on disk or on the Hugging Face hub, read line by line with every fault located."""

import codecs
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from lzma import LZMAError
from pathlib import Path
from typing import IO, NamedTuple, cast
from zipfile import BadZipFile, ZipFile

from sparton.errors import MissingDataError
from sparton.reading import Fields, read_json

GZIP_MAGIC = b"\x1f\x8b"
GZIP_WINDOW = 31  # for zlib: the largest window, in a gzip wrapper whose checksum is verified
CHUNK = 1 << 16
_SPLIT, _SPLITS = "state.json", "dataset_dict.json"  # in folders of save_to_disk
FORMATS = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "tsv": (".tsv", ".txt"),
    "csv": (".csv",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}

Advance = Callable[[int], None]


class RecordError(ValueError):
    """What is wrong with one record; whoever reads the file adds where it is."""


class DataFile(NamedTuple):
    """A readable file and the name it has for the user, who may know it by its hub name.

    Attributes:
        name: for messages.
        path: of the file.
        member: name within the archive, where ``path`` is a zip file.
    """

    name: str
    path: Path
    member: str | None = None

    def place(self, number: int) -> str:
        """Where record ``number`` (from 1) is, for messages."""
        unit = "row" if self.name.endswith(FORMATS["parquet"] + FORMATS["arrow"]) else "line"
        return f"{self.name}, {unit} {number}"


def locate(
    files: str | Sequence[str], *, root: str | None = None, hub: str | None = None
) -> list[DataFile]:
    """Find the files of a source, downloading those of a hub repository once.

    Args:
        files: names or glob patterns, relative to ``root`` if that is given; a name stands for
            that file or, where there is none, for the same with .gz. Patterns may be of folders,
            too, and take in no hidden files. On the hub, exact names in the repository.
        root: local folder that holds the files; goes before ``hub``.
        hub: dataset repository on the Hugging Face hub, ``owner/name``.

    Raises:
        MissingDataError: a name or pattern that fits nothing; says what the folder holds.
        ConnectionError: the hub did not give a file; says how to do without.
        ValueError: no name, a folder of several data sets, or a file that is named twice.
    """
    names = [files] if isinstance(files, str) else list(files)
    if not names:
        raise ValueError(f"files={names}: name a file, or several")
    if root is None and hub is not None:
        return [_download(hub, name) for name in names]
    try:
        found = [file for name in names for file in _find(Path(root or "."), name)]
    except MissingDataError as error:
        if hub is None:
            raise
        raise MissingDataError(f"{error}. Without a root it comes from {hub}") from None
    for path, times in Counter(file.path.resolve() for file in found).items():
        if times > 1:
            raise ValueError(f"{path} is named {times} times: leave all names but one out")
    return found


def _find(folder: Path, name: str) -> list[DataFile]:
    path = folder / name
    for candidate in (path, Path(f"{path}.gz")):
        if candidate.is_file():
            return [DataFile(str(candidate), candidate)]
    if path.is_dir():
        return [DataFile(str(each), each) for each in _saved_files(path)]
    # A folder that is there may have the characters of patterns in its name.
    start, pattern = (path.parent, path.name) if path.parent.is_dir() else (folder, name)
    matches = glob(pattern, root_dir=start, recursive=True)  # noqa: PTH207 (that takes hidden ones)
    found = sorted(start / each for each in matches if (start / each).is_file())
    if not found:
        raise MissingDataError(f"{path}: no such file. {_listing(path.parent)}")
    return [DataFile(str(each), each) for each in found]


def was_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` of `datasets` wrote a folder."""
    return (folder / _SPLIT).is_file() or (folder / _SPLITS).is_file()


def _saved_files(folder: Path) -> list[Path]:
    """The files of a folder that ``Dataset.save_to_disk`` wrote."""
    if (split := folder / _SPLIT).is_file():
        if not (parts := _fields(split).need("_data_files", list)):
            raise MissingDataError(
                f"{folder} was saved without rows: save a data set that has some"
            )
        return [folder / Fields.of(part, str(split)).path("filename") for part in parts]
    if (several := folder / _SPLITS).is_file():
        names = _fields(several).strings("splits") or ["train"]
        raise ValueError(
            f"{folder} holds the splits {', '.join(names)}: name one, as {folder / names[0]} does"
        )
    if (folder / "corpus.jsonl").is_file():
        raise MissingDataError(
            f"{folder} is a collection in the layout of BEIR, of texts and not of examples to train"
            f" on: make these of it, as sparton mine --beir {folder} does"
        )
    raise MissingDataError(f"{folder} is a folder: name its files, as {folder / '*.jsonl'} does")


def _fields(path: Path) -> Fields:
    return Fields.of(read_json(path), str(path))


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return f"The folder {folder} does not exist: give the root where the data is"
    names = sorted(each.name for each in folder.iterdir())
    return f"The folder holds {', '.join(names[:20]) or 'nothing'}"


def _download(hub: str, name: str) -> DataFile:
    from datasets import DownloadManager

    url = f"hf://datasets/{hub}/{name}"
    try:
        path = DownloadManager().download(url)
    except Exception as error:  # the hub's client raises errors of several libraries
        raise ConnectionError(
            f"{url} could not be downloaded ({error}): check the name and the connection, or set "
            f"root to a local folder that holds {name}"
        ) from error
    return DataFile(f"{hub}/{name}", Path(cast(str, path)))


def detect_format(file: DataFile) -> str:
    """The format, of :data:`FORMATS`, by the file's ending in any case, .gz aside."""
    suffix = Path(file.name.lower().removesuffix(".gz")).suffix
    for name, suffixes in FORMATS.items():
        if suffix in suffixes:
            return name
    known = ", ".join(ending for suffixes in FORMATS.values() for ending in suffixes)
    raise ValueError(
        f"{file.name}: the ending {suffix!r} tells no format: convert or rename it to one of "
        f"{known}, or one of these and .gz"
    )


def read_lines(file: DataFile, advance: Advance | None = None) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes of every line that is not blank, without its line ending.

    Gzip is recognised by content, not by name. ``advance`` is told the bytes read from disk.

    Raises:
        ValueError: compressed data that is damaged or cut short, with the last whole line before.
    """
    for number, content in read_all_lines(file, advance):
        if content and not content.isspace():
            yield number, content


def read_all_lines(file: DataFile, advance: Advance | None = None) -> Iterator[tuple[int, bytes]]:
    """As :func:`read_lines`, blank lines as well."""
    number = 0
    try:
        with _opened(file) as raw:
            for number, line in enumerate(_lines(_chunks(raw, advance)), start=1):
                content = line.rstrip(b"\r")
                yield number, content.removeprefix(b"\xef\xbb\xbf") if number == 1 else content
    except (EOFError, zlib.error, BadZipFile, LZMAError, RuntimeError) as error:
        kind = "zip" if file.member else "gzip"
        raise ValueError(
            f"{file.name}: the {kind} data is damaged or cut short after line {number} "
            f"({error}): get the file again"
        ) from error


@contextmanager
def _opened(file: DataFile) -> Iterator[IO[bytes]]:
    """The bytes of a file, from within its archive where it is in one; nothing is unpacked."""
    if file.member is None:
        with file.path.open("rb") as raw:
            yield raw
        return
    with ZipFile(file.path) as archive, archive.open(file.member) as raw:
        yield raw


def _chunks(raw: IO[bytes], advance: Advance | None) -> Iterator[bytes]:
    if raw.peek(2)[:2] == GZIP_MAGIC:  # type: ignore[attr-defined]
        yield from _gunzip(raw, advance)
        return
    while chunk := raw.read(CHUNK):
        yield chunk
        if advance:
            advance(raw.tell())


def _gunzip(raw: IO[bytes], advance: Advance | None) -> Iterator[bytes]:
    """Everything up to the point of damage, which the gzip module would drop with its buffer."""
    member = zlib.decompressobj(GZIP_WINDOW)
    while chunk := raw.read(CHUNK):
        while chunk:
            if member.eof:
                chunk = chunk.lstrip(b"\0")
                if not chunk:
                    break
                member = zlib.decompressobj(GZIP_WINDOW)
            yield member.decompress(chunk)
            chunk = member.unused_data
        if advance:
            advance(raw.tell())
    if not member.eof:
        raise EOFError("it ends in the middle")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without the newline; the last one only if the data ended well."""
    pieces: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        pieces.append(first)
        if others:
            yield b"".join(pieces)
            yield from others[:-1]
            pieces = [others[-1]]
    yield b"".join(pieces)


def decode_text(line: bytes) -> str:
    """The line as text; RecordError names the first byte that is not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        marked = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        likely = "utf-16" if marked else "latin1"
        raise RecordError(
            f"not UTF-8 text: byte 0x{line[error.start]:02x} at column {error.start + 1} "
            f"(if the file is {likely}, convert it: iconv -f {likely} -t utf-8)"
        ) from error
