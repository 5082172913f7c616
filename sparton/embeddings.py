"""How texts find their dense embeddings, which were made before.

R rows: those of the queries first, then those of the documents; D width; N texts.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.embedding_files import EMBEDDINGS, KEYS, check_cache
from sparton.types import Forms, Side, TextForm, TokenBatch


class TextRows:
    """Takes the place of a tokenizer: a text becomes one token, the row of its embedding.

    Args:
        folder: of a complete cache.

    Raises:
        FileNotFoundError, ValueError: see :func:`~sparton.embedding_files.check_cache`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        cache = check_cache(self.folder, KEYS)
        self.facts, keys = cache.facts, np.array(cache.keys)
        self._sides: dict[Side, KeyRows] = {
            "query": KeyRows.of(keys[: self.facts.queries], 0),
            "document": KeyRows.of(keys[self.facts.queries :], self.facts.queries),
        }

    def queries(self, texts: Sequence[str], forms: Forms = None) -> TokenBatch:
        """One row number per query.

        Raises:
            ValueError: the cache has no such query, or none that was read in such a form.
        """
        return self._rows(texts, forms, "query")

    def documents(self, texts: Sequence[str], forms: Forms = None) -> TokenBatch:
        """One row number per document.

        Raises:
            ValueError: the cache has no such document, or none that was read in such a form.
        """
        return self._rows(texts, forms, "document")

    def check_lengths(self, query_length: int, document_length: int) -> None:
        """Refuse lengths at which a model would see other texts than the cached ones.

        Raises:
            ValueError: they differ from those of the cache.
        """
        cached = (self.facts.query_length, self.facts.document_length)
        if (query_length, document_length) != cached:
            raise ValueError(
                f"the embeddings in {self.folder} are of texts cut at {cached[0]} and {cached[1]} "
                f"tokens, not at query_length={query_length} and document_length="
                f"{document_length}: set these to {cached[0]} and {cached[1]}"
            )

    def _check_form(self, form: TextForm) -> None:
        for name, asked in form._asdict().items():
            cached = getattr(self.facts, name)
            if asked not in (None, cached):
                raise ValueError(
                    f"the embeddings in {self.folder} are of texts that were read with {name}="
                    f"{cached!r}, not with {asked!r}: leave that out, or train on a model instead "
                    "of its embeddings"
                )

    def _rows(self, texts: Sequence[str], forms: Forms, side: Side) -> TokenBatch:
        for form in {forms} if isinstance(forms, TextForm) else {*(forms or ())}:
            self._check_form(form)
        rows = self._sides[side].find(text_keys(texts))
        unknown = np.flatnonzero(rows < 0)
        if unknown.size:
            raise ValueError(
                f"{self.folder} has no embedding of the {side} {texts[unknown[0]][:80]!r}: give "
                "sparton embed (in Python, sparton.pipelines.cache_embeddings) all the texts that "
                "a run reads, those of its evaluation too"
            )
        count = len(rows)
        return TokenBatch(
            torch.from_numpy(rows),
            torch.zeros(count, dtype=torch.int64),
            torch.arange(count + 1, dtype=torch.int32),
            1,
        )


class EmbeddingTable:
    """The embeddings themselves, by row.

    Args:
        folder: of a complete cache.
        on_device: copy the table to the device that asks for rows, once, instead of reading every
            row from the memory-mapped file.

    Raises:
        FileNotFoundError, ValueError: see :func:`~sparton.embedding_files.check_cache`.
    """

    def __init__(self, folder: str | Path, *, on_device: bool = True) -> None:
        self._stored = check_cache(Path(folder), EMBEDDINGS).embeddings
        self._on_device = on_device
        self._copy: Tensor | None = None

    @property
    def width(self) -> int:
        """D, the width of an embedding."""
        return self._stored.shape[1]

    def take(self, rows: Tensor) -> Tensor:
        """The embeddings fp32 ``[N, D]`` of int64 ``rows [N]``, on their device."""
        if rows.device.type == "cpu" or not self._on_device:
            found = torch.from_numpy(self._stored[rows.cpu().numpy()])
            return found.to(rows.device, torch.float32)
        if self._copy is None or self._copy.device != rows.device:
            self._copy = torch.from_numpy(np.array(self._stored)).to(rows.device)
        return self._copy.index_select(0, rows).float()


class KeyRows(NamedTuple):
    """Hashes in ascending order, and the row of each."""

    hashes: NDArray[np.uint64]
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, keys: NDArray[np.uint64], first_row: int) -> "KeyRows":
        order = np.argsort(keys)
        return cls(keys[order], order + first_row)

    def find(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The row of each key, -1 where there is none."""
        if not len(self.hashes):
            return np.full(len(keys), -1)
        places = np.searchsorted(self.hashes, keys).clip(max=len(self.hashes) - 1)
        return np.where(self.hashes[places] == keys, self.rows[places], -1)


def text_keys(texts: Iterable[str]) -> NDArray[np.uint64]:
    """64-bit hashes of texts. Two of ten million different texts have the same with a probability
    of three in a million."""
    encoded = (text.encode(errors="surrogatepass") for text in texts)
    digests = (hashlib.blake2b(each, digest_size=8).digest() for each in encoded)
    return np.frombuffer(b"".join(digests), np.dtype("<u8")).astype(np.uint64)
