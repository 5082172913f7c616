"""What tells that content is what it was; against damage and mistakes, not against forgery."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import xxhash


class Seal(NamedTuple):
    """What a file was when it was written.

    Attributes:
        size: in bytes.
        digest: of its content, XXH3 of 128 bits, which is read as fast as a disk gives it.
    """

    size: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> "Seal":
        """The seal of a file as it is now."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        return cls(path.stat().st_size, digest)

    def fault(self, path: Path) -> str | None:
        """What is wrong with the file that was sealed so, if anything."""
        if not path.is_file():
            return f"{path.name} is missing"
        if (size := path.stat().st_size) != self.size:
            return f"{path.name} has {size} bytes in the place of {self.size}"
        if Seal.of(path) != self:
            return f"{path.name} has another content than was written"
        return None


class TextsDigest:
    """A digest of texts in their order, which are given one after the other."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, texts: Iterable[str]) -> "TextsDigest":
        """Add texts to those before, and give this digest."""
        for text in texts:
            content = text.encode(errors="surrogatepass")
            self._digest.update(len(content).to_bytes(8, "little") + content)
        return self

    def __str__(self) -> str:
        return self._digest.hexdigest()


def texts_digest(texts: Iterable[str]) -> str:
    """A digest of texts in their order."""
    return str(TextsDigest().update(texts))


def records_digest(ids: Iterable[str], texts: Iterable[str]) -> str:
    """A digest of texts and their ids, in their order."""
    return texts_digest(part for record in zip(ids, texts, strict=True) for part in record)
