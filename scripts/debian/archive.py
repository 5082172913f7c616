"""Packages of a Debian suite: what there is, and the files in them.

An index says of each package where its file is, and its digest. A package is an ``ar`` archive with
a tar of its files in it.
"""

import gzip
import hashlib
import io
import lzma
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DEFAULT_SUITE = "http://deb.debian.org/debian/dists/bookworm"
INDEXES = ("main/binary-all/Packages.xz", "main/binary-amd64/Packages.xz")
DESCRIPTIONS = "main/i18n/Translation-en.xz"
AR_MAGIC, AR_HEADER = b"!<arch>\n", 60


class Suite:
    """A suite of an archive, and a folder that keeps what was downloaded.

    Args:
        address: ``.../dists/NAME``, of a mirror or a folder (``file:///...``).
        downloads: where files are kept.
    """

    def __init__(self, address: str, downloads: Path) -> None:
        self.address, self.downloads = address.rstrip("/"), downloads
        downloads.mkdir(parents=True, exist_ok=True)
        release = self._fetch(f"{self.address}/Release").decode()
        lines = release.partition("\nSHA256:\n")[2].splitlines()
        entries = (line.split() for line in lines if line.startswith(" "))
        self._digests = {name: digest for digest, _, name in entries}
        self._packages = {
            fields["Package"]: fields
            for index in INDEXES
            if index in self._digests
            for fields in paragraphs(self.index(index))
        }

    def index(self, name: str) -> str:
        """The text of a compressed index, by its name in the suite."""
        if name not in self._digests:
            raise ValueError(f"{self.address}/Release lists no {name}")
        packed = self._kept(f"{self.address}/{name}", self._digests[name])
        return lzma.decompress(packed).decode()

    def version(self, package: str) -> str:
        return self._fields(package)["Version"]

    def files(self, package: str) -> Iterator["PackedFile"]:
        """The regular files of a package, unpacked where they are gzipped."""
        fields = self._fields(package)
        root = self.address.rpartition("/dists/")[0]
        deb = self._kept(f"{root}/{fields['Filename']}", fields["SHA256"])
        with tarfile.open(fileobj=io.BytesIO(_data_tar(deb, package))) as files:
            for member in files:
                if member.isfile() and (content := files.extractfile(member)) is not None:
                    name, packed = member.name.removeprefix("./"), content.read()
                    if name.endswith(".gz"):
                        name, packed = name.removesuffix(".gz"), gzip.decompress(packed)
                    yield PackedFile(name, packed)

    def _fields(self, package: str) -> dict[str, str]:
        if package not in self._packages:
            raise ValueError(f"{self.address} has no package {package}")
        return self._packages[package]

    def _kept(self, address: str, digest: str) -> bytes:
        """What lies at an address: from the folder, if it has been there."""
        kept = self.downloads / digest
        if kept.exists():
            return kept.read_bytes()
        content = self._fetch(address)
        if (found := hashlib.sha256(content).hexdigest()) != digest:
            raise ValueError(
                f"{address} has the SHA256 {found}, the suite says {digest}: try again"
            )
        partial = kept.with_suffix(".part")
        partial.write_bytes(content)
        partial.replace(kept)
        return content

    @staticmethod
    def _fetch(address: str) -> bytes:
        with urllib.request.urlopen(address) as answer:
            return answer.read()


class PackedFile(NamedTuple):
    name: str
    content: bytes

    def text(self) -> str:
        return self.content.decode("utf-8", errors="replace")


def paragraphs(index: str) -> Iterator[dict[str, str]]:
    """The fields of each paragraph of a control file; lines that go on keep their break."""
    for paragraph in index.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in paragraph.splitlines():
            if line[:1] in " \t":
                fields[name] += f"\n{line}"
            elif line:
                name, _, value = line.partition(":")
                fields[name] = value.strip()
        if fields:
            yield fields


def _data_tar(deb: bytes, package: str) -> bytes:
    """The member of a package that has its files, decompressed by tarfile later."""
    place = len(AR_MAGIC)
    while deb.startswith(AR_MAGIC) and place < len(deb):
        header = deb[place : place + AR_HEADER]
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        place += AR_HEADER
        if name.startswith("data.tar"):
            return deb[place : place + size]
        place += size + size % 2  # members begin at even places
    raise ValueError(f"the file of {package} has no data.tar")
