"""What ranks the collection: BM25, or an encoder whose documents are encoded once.

N documents, E positives outside of the collection, V terms.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hard_negatives.examples import ROWS_AT_ONCE, Documents
from sparton.evaluation import load_retriever
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.encoding import EncodedTexts, encode_texts
from sparton.retrieval.index import RERANK_DEPTH, TextIndex, score_pairs
from sparton.retrieval.output import replacing
from sparton.retrieval.sparse import SparseRows
from sparton.retrieval.tokens import TokenRows

SLAB = 65_536
Encode = Callable[[Sequence[str]], EncodedTexts]


class Encoding(NamedTuple):
    """How a model of this project reads texts; None takes what its folder says."""

    query_length: int | None
    document_length: int | None
    max_document_terms: int | None
    precision: str
    device: torch.device


class Miner:
    """Ranks the collection for queries, and scores single documents.

    Args:
        queries: encodes queries.
        documents: N + E texts, of which the first N are ranked.
        size: N.
        device: where to search.
    """

    def __init__(
        self, queries: Encode, documents: EncodedTexts, size: int, device: torch.device
    ) -> None:
        self._encode = queries
        self._documents = documents
        self._index = TextIndex(documents.slice(0, size), device)
        self._device = device
        self.size = size

    def rank(
        self, texts: Sequence[str], depth: int
    ) -> tuple[EncodedTexts, NDArray[np.float32], NDArray[np.int64]]:
        """The queries encoded, and scores and rows ``[Q, depth]`` as
        :meth:`TextIndex.search` gives them."""
        queries, depth = self._encode(texts), min(depth, self.size)
        candidates = max(RERANK_DEPTH, depth)
        return (queries, *self._index.search(queries, depth, rerank_depth=candidates))

    def score(self, queries: EncodedTexts, query: int, rows: Sequence[int]) -> list[float]:
        """Scores of documents of the N + E for one of the encoded queries."""
        pairs = np.array([(query, row) for row in rows], np.int64).reshape(-1, 2)
        return score_pairs(queries, self._documents, pairs, self._device).tolist()


def bm25_miner(parts: Sequence[Documents], *, k1: float, b: float, device: torch.device) -> Miner:
    """BM25, whose statistics count both parts: the collection, and the positives outside of it."""
    bm25 = BM25(k1, b)
    texts = (
        text for part in parts for rows in _ranges(part, ROWS_AT_ONCE) for text in part.texts(rows)
    )
    documents = EncodedTexts(bm25.fit(texts))
    return Miner(
        lambda queries: EncodedTexts(bm25.queries(queries)), documents, len(parts[0]), device
    )


def model_miner(model: str, parts: Sequence[Documents], encoding: Encoding, folder: Path) -> Miner:
    """A model of this project. Encoded documents are kept in ``folder`` slab by slab, so that an
    interrupted run does not encode them again."""
    encoder, tokenizer = load_retriever(
        model, encoding.query_length, encoding.document_length, device=encoding.device
    )
    encode = partial(encode_texts, encoder, tokenizer, precision=encoding.precision)
    slabs = [(part, rows) for part in parts for rows in _ranges(part, SLAB)]
    encoded = []
    for number, (part, rows) in enumerate(slabs):
        file = folder / f"documents-{number:05d}.npz"
        if not file.exists():
            fresh = encode(
                part.texts(rows),
                "document",
                max_terms=encoding.max_document_terms,
                progress=f"documents, slab {number + 1} of {len(slabs)}",
            )
            _write_slab(file, fresh)
        encoded.append(_read_slab(file))
    documents = EncodedTexts.concatenate(encoded)
    return Miner(partial(encode, side="query"), documents, len(parts[0]), encoding.device)


def _ranges(documents: Documents, size: int) -> Iterator[range]:
    for start in range(0, len(documents), size):
        yield range(start, min(start + size, len(documents)))


def _write_slab(file: Path, texts: EncodedTexts) -> None:
    arrays = {
        f"{kind}.{name}": array
        for kind, rows in texts._asdict().items()
        if rows is not None
        for name, array in rows._asdict().items()
    }
    with replacing(file) as fresh, fresh.open("wb") as sink:
        np.savez(sink, **arrays)


def _read_slab(file: Path) -> EncodedTexts:
    with np.load(file) as stored:
        halves: dict[str, dict[str, Any]] = {"sparse": {}, "tokens": {}}
        for key in stored.files:
            kind, name = key.split(".")
            halves[kind][name] = stored[key]
    sparse, tokens = halves.values()
    return EncodedTexts(
        SparseRows(**sparse | {"width": int(sparse["width"])}) if sparse else None,
        TokenRows(**tokens) if tokens else None,
    )
