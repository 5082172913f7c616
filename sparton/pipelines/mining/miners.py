"""What ranks the collection, BM25 or a model; either can be a teacher, too.

N documents, E positives outside of the collection, V terms, Q queries.
"""

from collections.abc import Callable, Sequence
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
from sparton.evaluation import check_model, load_retriever
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.models.encoder import Encoder
from sparton.packing import ranges_of
from sparton.pipelines.mining.examples import texts_of
from sparton.pipelines.mining.pairs import (
    Encode,
    HeldDocuments,
    Rows,
    Similarities,
    Teach,
    score_rows,
)
from sparton.representations import KINDS, Representations, TokenVectors
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.indexes.exact import RERANK_DEPTH, exact_index
from sparton.types import SIDES
from sparton.writing import replacing

SLAB = 65_536  # documents that are encoded and kept together


class Setup(NamedTuple):
    """What miners and teachers are built from.

    Attributes:
        documents: texts, the collection first, and what is outside of it.
        pairs: about how many pairs of a query and a document a teacher is going to be asked.
        folder: where they may keep what they have encoded.
        device: where models run and vectors are compared.
        progress: show bars on standard error.
        fitted: by whom BM25 was fitted to the documents, and what came of it.
    """

    documents: Sequence[TextsByRow]
    pairs: int
    folder: Path
    device: torch.device
    progress: bool
    fitted: "dict[BM25Miner, tuple[BM25, Representations]]"


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

    def score(self, queries: Representations, asked: Rows, rows: Rows) -> NDArray[np.float32]:
        """Scores fp32 ``[P]`` of pairs: the number of one of the encoded queries, int64 ``[P]``,
        and the row of one of the N + E documents, int64 ``[P]``."""
        return score_rows(queries, self._take, asked, rows, self._device)

    def _take(self, rows: Rows) -> Representations:
        return self._documents.take(torch.from_numpy(rows))


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

    def build(self, setup: Setup) -> Ranker:
        """Count the terms of the collection, and of what is outside of it."""
        bm25, documents = self._fit(setup)
        size = len(setup.documents[0])
        return Ranker(lambda q: Representations(bm25.queries(q)), documents, size, setup.device)

    def load(self, setup: Setup, name: str) -> Teach:
        """What scores pairs of a query and a document by the statistics of the documents."""
        bm25, documents = self._fit(setup)
        return Similarities(
            lambda texts: Representations(bm25.queries(texts)),
            lambda texts: Representations(bm25.documents(texts)),
            setup.device,
            HeldDocuments(setup.documents[0], [documents]),
        )

    def _fit(self, setup: Setup) -> tuple[BM25, Representations]:
        """Once for miner and teachers."""
        if self not in setup.fitted:
            bm25 = BM25(self.k1, self.b)
            setup.fitted[self] = bm25, Representations(bm25.fit(texts_of(setup.documents)))
        return setup.fitted[self]


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

    def build(self, setup: Setup) -> Ranker:
        """Encode the collection, and what is outside of it. What has been encoded is kept in the
        folder slab by slab, so that an interrupted run does not encode it again."""
        encode = self._encoding(setup.device)
        slabs = self._slabs(encode, setup.documents, setup.folder, setup.progress)
        documents, size = Representations.concatenate(slabs), len(setup.documents[0])
        return Ranker(partial(encode, side="query"), documents, size, setup.device)

    def load(self, setup: Setup, name: str) -> Teach:
        """What scores pairs of a query and a document. Where these are more than the collection has
        documents, it is encoded first, as :meth:`build` does it, in a folder of this name; else
        each part of the examples has its documents encoded.

        Raises:
            ArgumentError: documents of a teacher are encoded with all their terms.
        """
        refuse_ignored("a teacher", max_document_terms=self.max_document_terms)
        encode, collection, held = self._encoding(setup.device), setup.documents[0], None
        if setup.pairs >= len(collection):
            slabs = self._slabs(encode, [collection], setup.folder / name, setup.progress)
            held = HeldDocuments(collection, slabs)
        queries, documents = (partial(encode, side=side) for side in SIDES)
        return Similarities(queries, documents, setup.device, held)

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
