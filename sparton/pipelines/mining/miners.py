"""What ranks the collection, BM25 or a model; either can be a teacher, too.

N documents, E positives outside of the collection, V terms, Q queries.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from sparton.arguments import refuse_below, refuse_ignored
from sparton.datasets.texts import TextsByRow
from sparton.embeddings import KeyRows, text_keys
from sparton.evaluation import check_model, load_retriever
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.models.encoder import Encoder
from sparton.packing import ranges_of
from sparton.pipelines.mining.examples import ROWS_AT_ONCE
from sparton.representations import KINDS, Representations, TokenVectors
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.indexes.exact import RERANK_DEPTH, exact_index, score_pairs
from sparton.writing import replacing

SLAB = 65_536  # documents that are encoded and kept together
Encode = Callable[..., Representations]
Pairs = Sequence[tuple[str, str]]
Score = Callable[[Pairs], NDArray[np.float32]]


class Lesson(NamedTuple):
    """What a teacher is going to be asked.

    Attributes:
        documents: N texts, the collection that most documents are of.
        pairs: about how many pairs of a query and a document.
        folder: where it may keep what it has encoded.
    """

    documents: TextsByRow
    pairs: int
    folder: Path


class Ranker:
    """Ranks the collection for queries, and scores single documents.

    Args:
        queries: encodes queries.
        documents: N + E texts, of which the first N are ranked.
        size: N.
        device: where to search.
    """

    def __init__(
        self, queries: Encode, documents: Representations, size: int, device: torch.device
    ) -> None:
        self._encode = queries
        self._documents = documents
        ranked = documents.slice(0, size)
        # By the number of candidates, which stays the same in a run.
        self._index = lru_cache(1)(lambda depth: exact_index(ranked, device, rerank_depth=depth))
        self._device = device
        self.size = size

    def rank(
        self, texts: Sequence[str], depth: int
    ) -> tuple[Representations, NDArray[np.float32], NDArray[np.int64]]:
        """The queries encoded, and scores and rows ``[Q, depth]`` as
        :meth:`Index.search <sparton.retrieval.indexes.protocols.Index.search>` gives them."""
        queries, depth = self._encode(texts), min(depth, self.size)
        return (queries, *self._index(max(RERANK_DEPTH, depth)).search(queries, depth))

    def score(self, queries: Representations, query: int, rows: Sequence[int]) -> list[float]:
        """Scores of documents of the N + E for one of the encoded queries."""
        pairs = np.array([(query, row) for row in rows], np.int64).reshape(-1, 2)
        return score_pairs(queries, self._documents, pairs, self._device).tolist()


@dataclass(frozen=True)
class BM25Miner:
    """BM25, whose statistics count the collection and the positives outside of it.

    Attributes:
        k1, b: see :class:`~sparton.retrieval.bm25.BM25`.

    Raises:
        ValueError: a number out of range.
    """

    k1: float = 0.9
    b: float = 0.4

    def __post_init__(self) -> None:
        BM25(self.k1, self.b)  # refuses what is out of range

    def build(
        self, parts: Sequence[TextsByRow], folder: Path, device: torch.device, progress: bool
    ) -> Ranker:
        """Count the terms of the collection, ``parts[0]``, and of what is outside of it."""
        bm25 = BM25(self.k1, self.b)
        documents = Representations(bm25.fit(_texts(parts)))
        return Ranker(lambda q: Representations(bm25.queries(q)), documents, len(parts[0]), device)

    def load(self, lesson: Lesson, device: torch.device, progress: bool) -> Score:
        """What scores pairs of a query and a document by the statistics of the collection."""
        bm25 = BM25(self.k1, self.b)
        bm25.fit(_texts([lesson.documents]))
        return _pair_score(
            lambda texts: Representations(bm25.queries(texts)),
            lambda texts: Representations(bm25.documents(texts)),
            device,
        )


@dataclass(frozen=True)
class TrainedModel:
    """A trained model; as teacher, too, it scores by the weighted sum of all scores where it gives
    dense vectors beside others, else by MaxSim where it gives token vectors, else by the dot
    product of sparse ones.

    Attributes:
        model: loaded, or its folder or hub name.
        query_length, document_length: tokens at which texts are cut; None for what the model was
            trained with.
        max_document_terms: keep this many of a document's largest weights; None for all.
        precision: see :func:`~sparton.retrieval.encoding.encode_texts`.

    Raises:
        FileNotFoundError: neither a folder nor a name on the hub.
        ArgumentError: a number out of range.
    """

    model: str | Path | Encoder
    query_length: int | None = None
    document_length: int | None = None
    max_document_terms: int | None = None
    precision: str = "fp32"

    def __post_init__(self) -> None:
        refuse_below(
            1,
            query_length=self.query_length,
            document_length=self.document_length,
            max_document_terms=self.max_document_terms,
        )
        if not isinstance(self.model, Encoder):
            check_model(self.model)

    def build(
        self, parts: Sequence[TextsByRow], folder: Path, device: torch.device, progress: bool
    ) -> Ranker:
        """Encode the collection, ``parts[0]``, and what is outside of it. What has been encoded is
        kept in ``folder`` slab by slab, so that an interrupted run does not encode it again."""
        encode = self._encoding(device)
        documents = Representations.concatenate(self._slabs(encode, parts, folder, progress))
        return Ranker(partial(encode, side="query"), documents, len(parts[0]), device)

    def load(self, lesson: Lesson, device: torch.device, progress: bool) -> Score:
        """What scores pairs of a query and a document. Where these are more than the collection has
        documents, it is encoded first, as :meth:`build` does it; else each part of the examples has
        its documents encoded.

        Raises:
            ArgumentError: documents of a teacher are encoded with all their terms.
        """
        refuse_ignored("a teacher", max_document_terms=self.max_document_terms)
        encode = self._encoding(device)
        queries: Encode = partial(encode, side="query")
        documents: Encode = partial(encode, side="document")
        if lesson.pairs >= len(lesson.documents):
            slabs = self._slabs(encode, [lesson.documents], lesson.folder, progress)
            documents = HeldDocuments(lesson.documents, slabs, documents)
        return _pair_score(queries, documents, device)

    def _slabs(
        self, encode: Encode, parts: Sequence[TextsByRow], folder: Path, progress: bool
    ) -> list[Representations]:
        """The documents of all parts; those that were encoded before are read from the folder."""
        folder.mkdir(exist_ok=True)
        slabs = [(part, rows) for part in parts for rows in ranges_of(len(part), SLAB)]
        encoded = []
        for number, (part, rows) in enumerate(slabs):
            file = folder / f"documents-{number:05d}.safetensors"
            if not file.exists():
                label = f"documents, slab {number + 1} of {len(slabs)}" if progress else None
                fresh = encode(
                    part.take(rows).texts,
                    side="document",
                    max_terms=self.max_document_terms,
                    progress=label,
                )
                _write_slab(file, fresh)
            encoded.append(_read_slab(file))
        return encoded

    def _encoding(self, device: torch.device) -> Callable[..., Representations]:
        """``encode_texts`` of this model, still to be given texts and a side."""
        lengths = self.query_length, self.document_length
        retriever = load_retriever(self.model, *lengths, device=device)
        return partial(encode_texts, *retriever, precision=self.precision)


class HeldDocuments:
    """Encodes texts by looking up those of a collection that was encoded before.

    Args:
        documents: the collection.
        slabs: what its documents became, SLAB to each, as :class:`TrainedModel` has them.
        encode: encodes other texts.
    """

    def __init__(
        self, documents: TextsByRow, slabs: Sequence[Representations], encode: Encode
    ) -> None:
        self._slabs, self._encode = slabs, encode
        self._rows = KeyRows.of(text_keys(_texts([documents])), 0)

    def __call__(self, texts: Sequence[str]) -> Representations:
        rows = self._rows.find(text_keys(texts))
        slab_of = rows // SLAB  # -1 for other texts
        found, order = [], []
        for number in np.unique(slab_of).tolist():
            here = np.flatnonzero(slab_of == number)
            if number < 0:
                found.append(self._encode([texts[place] for place in here.tolist()]))
            else:
                found.append(self._slabs[number].take(torch.from_numpy(rows[here] % SLAB)))
            order.append(here)
        in_place = torch.from_numpy(np.argsort(np.concatenate(order)))
        return Representations.concatenate(found).take(in_place)


def _pair_score(queries: Encode, documents: Encode, device: torch.device) -> Score:
    """What encodes the texts of pairs, each once, and scores the pairs."""

    def score(pairs: Pairs) -> NDArray[np.float32]:
        sides = [list(dict.fromkeys(texts)) for texts in zip(*pairs)]
        encoded = [encode(texts) for encode, texts in zip((queries, documents), sides)]
        places = [{text: row for row, text in enumerate(texts)} for texts in sides]
        rows = np.array([(places[0][query], places[1][document]) for query, document in pairs])
        return score_pairs(encoded[0], encoded[1], rows, device)

    return score


def _texts(parts: Sequence[TextsByRow]) -> Iterator[str]:
    for part in parts:
        for rows in ranges_of(len(part), ROWS_AT_ONCE):
            yield from part.take(rows).texts


def _write_slab(file: Path, texts: Representations) -> None:
    tensors = {
        f"{kind}.{name}": value.contiguous()
        for kind in texts.kinds
        for name, value in getattr(texts, kind)._asdict().items()
        if isinstance(value, torch.Tensor)
    }
    with replacing(file) as fresh:
        save_file(tensors, fresh, {"width": str(texts.width)})


def _read_slab(file: Path) -> Representations:
    with safe_open(file, "pt") as stored:
        width = int(stored.metadata()["width"])
        halves: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        for key in stored.keys():  # noqa: SIM118
            kind, name = key.split(".")
            halves[kind][name] = stored.get_tensor(key)
    sparse, tokens, dense = halves.values()
    return Representations(
        SparseVectors(**sparse, width=width) if sparse else None,
        TokenVectors(**tokens) if tokens else None,
        TokenVectors(**dense) if dense else None,
    )
