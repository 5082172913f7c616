"""What ranks the collection: BM25, or a sparse encoder whose documents are encoded once.

N documents, E positives outside of the collection, V terms.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hard_negatives.examples import ROWS_AT_ONCE, Documents
from sparton.evaluation import load_retriever
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.output import replacing
from sparton.retrieval.sparse import SparseIndex, SparseRows

SLAB = 65_536
Encode = Callable[[Sequence[str]], SparseRows]


class Encoding(NamedTuple):
    """How a model of this project reads texts; None takes what its folder says."""

    query_length: int | None
    document_length: int | None
    max_document_terms: int | None
    bf16: bool
    device: torch.device


class Miner:
    """Ranks the collection for queries, and scores single documents.

    Args:
        queries: encodes queries.
        documents: ``[N + E, V]``, of which the first N are ranked.
        size: N.
        device: where to search.
    """

    def __init__(
        self, queries: Encode, documents: SparseRows, size: int, device: torch.device
    ) -> None:
        self._encode = queries
        self._documents = documents
        stop = documents.indptr[size]
        ranked = SparseRows(
            documents.indptr[: size + 1],
            documents.indices[:stop],
            documents.values[:stop],
            documents.width,
        )
        self._index = SparseIndex(ranked, device)
        self.size = size

    def rank(
        self, texts: Sequence[str], depth: int
    ) -> tuple[SparseRows, NDArray[np.float32], NDArray[np.int64]]:
        """The queries encoded, and scores and rows ``[Q, depth]`` as
        :meth:`SparseIndex.search` gives them."""
        queries = self._encode(texts)
        return (queries, *self._index.search(queries, min(depth, self.size)))

    def score(self, queries: SparseRows, query: int, rows: Sequence[int]) -> list[float]:
        """Scores of documents of the N + E for one of the encoded queries."""
        return [dot(queries, query, self._documents, row) for row in rows]


def dot(queries: SparseRows, query: int, documents: SparseRows, document: int) -> float:
    first, last = queries.indptr[query : query + 2]
    start, stop = documents.indptr[document : document + 2]
    _, left, right = np.intersect1d(
        queries.indices[first:last],
        documents.indices[start:stop],
        assume_unique=True,
        return_indices=True,
    )
    return float(queries.values[first:last][left] @ documents.values[start:stop][right])


def bm25_miner(parts: Sequence[Documents], *, k1: float, b: float, device: torch.device) -> Miner:
    """BM25, whose statistics count both parts: the collection, and the positives outside of it."""
    bm25 = BM25(k1, b)
    texts = (
        text for part in parts for rows in _ranges(part, ROWS_AT_ONCE) for text in part.texts(rows)
    )
    return Miner(bm25.queries, bm25.fit(texts), len(parts[0]), device)


def model_miner(model: str, parts: Sequence[Documents], encoding: Encoding, folder: Path) -> Miner:
    """A model of this project. Encoded documents are kept in ``folder`` slab by slab, so that an
    interrupted run does not encode them again."""
    encoder, tokenizer = load_retriever(
        model, encoding.query_length, encoding.document_length, device=encoding.device
    )
    encode = partial(encode_texts, encoder, bf16=encoding.bf16)
    slabs = [(part, rows) for part in parts for rows in _ranges(part, SLAB)]
    encoded = []
    for number, (part, rows) in enumerate(slabs):
        file = folder / f"documents-{number:05d}.npz"
        if not file.exists():
            fresh = encode(
                tokenizer.documents,
                part.texts(rows),
                max_terms=encoding.max_document_terms,
                progress=f"documents, slab {number + 1} of {len(slabs)}",
            )
            _write_slab(file, fresh)
        encoded.append(_read_slab(file))
    documents = SparseRows.concatenate(encoded)
    return Miner(partial(encode, tokenizer.queries), documents, len(parts[0]), encoding.device)


def _ranges(documents: Documents, size: int) -> Iterator[range]:
    for start in range(0, len(documents), size):
        yield range(start, min(start + size, len(documents)))


def _write_slab(file: Path, rows: SparseRows) -> None:
    with replacing(file) as fresh, fresh.open("wb") as sink:
        np.savez(sink, **rows._asdict())


def _read_slab(file: Path) -> SparseRows:
    with np.load(file) as stored:
        return SparseRows(
            stored["indptr"], stored["indices"], stored["values"], int(stored["width"])
        )
