"""What ranks the collection, BM25 or a model; either can be a teacher, too.

N documents, E positives outside of the collection, V terms, Q queries.
"""

from collections.abc import Mapping, Sequence
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
from sparton.datasets.lengths import shares_cut
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
from sparton.types import Side
from sparton.writing import replacing

SLAB = 65_536  # documents that are encoded and kept together


class Encoding(NamedTuple):
    """What equal miners and teachers encode with, and what came of it.

    Attributes:
        queries, documents: encode texts.
        slabs: all documents, encoded; none before somebody needs them.
    """

    queries: Encode
    documents: Encode
    slabs: list[Representations]


class Setup(NamedTuple):
    """What miners and teachers are built from.

    Attributes:
        documents: texts, the collection first, and what is outside of it.
        sample: some of the queries and of the collection, in which models count what they cut.
        pairs: about how many pairs of a query and a document a teacher is going to be asked.
        folder: where they may keep what they have encoded.
        device: where models run and vectors are compared.
        progress: show bars on standard error.
        encodings: those of the miners and teachers so far.
    """

    documents: Sequence[TextsByRow]
    sample: Mapping[Side, Sequence[str]]
    pairs: int
    folder: Path
    device: torch.device
    progress: bool
    encodings: "dict[BM25Miner | TrainedModel, Encoding]"


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

    def build(self, setup: Setup, name: str) -> Ranker:
        """Count the terms of the collection, and of what is outside of it."""
        bm25 = self._fit(setup)
        return Ranker(bm25.queries, bm25.slabs[0], len(setup.documents[0]), setup.device)

    def load(self, setup: Setup, name: str) -> Teach:
        """What scores pairs of a query and a document by the statistics of the documents."""
        bm25 = self._fit(setup)
        held = HeldDocuments(setup.documents[0], bm25.slabs)
        return Similarities(bm25.queries, bm25.documents, setup.device, held)

    def _fit(self, setup: Setup) -> Encoding:
        """Once for miner and teachers."""
        if self not in setup.encodings:
            bm25 = BM25(self.k1, self.b)
            setup.encodings[self] = Encoding(
                _remembering(lambda texts: Representations(bm25.queries(texts))),
                lambda texts: Representations(bm25.documents(texts)),
                [Representations(bm25.fit(texts_of(setup.documents)))],
            )
        return setup.encodings[self]


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
    precision: str | None = None

    def __post_init__(self) -> None:
        refuse_below(
            1,
            query_length=self.query_length,
            document_length=self.document_length,
            max_document_terms=self.max_document_terms,
        )
        if not isinstance(self.model, Encoder):
            check_model(self.model)

    def build(self, setup: Setup, name: str) -> Ranker:
        """Encode the collection, and what is outside of it. What has been encoded is kept in a
        folder of this name slab by slab, so that an interrupted run does not encode it again."""
        documents = Representations.concatenate(self._slabs(setup, setup.folder / name))
        queries, size = self.encoding(setup).queries, len(setup.documents[0])
        return Ranker(queries, documents, size, setup.device)

    def load(self, setup: Setup, name: str) -> Teach:
        """What scores pairs of a query and a document. Where these are more than the collection has
        documents, it is encoded first, as :meth:`build` does it, in a folder of this name, for a
        miner, too, that is equal; else each part of the examples has its documents encoded.

        Raises:
            ArgumentError: documents of a teacher are encoded with all their terms.
        """
        refuse_ignored("a teacher", max_document_terms=self.max_document_terms)
        encoding, collection, held = self.encoding(setup), setup.documents[0], None
        if setup.pairs >= len(collection):
            held = HeldDocuments(collection, self._slabs(setup, setup.folder / name))
        return Similarities(encoding.queries, encoding.documents, setup.device, held)

    def _slabs(self, setup: Setup, folder: Path) -> list[Representations]:
        """All documents, once for miner and teachers; those that were encoded before are read from
        the folder."""
        encoding = self.encoding(setup)
        if encoding.slabs:
            return encoding.slabs
        folder.mkdir(exist_ok=True)
        slabs = [(part, rows) for part in setup.documents for rows in ranges_of(len(part), SLAB)]
        for number, (part, rows) in enumerate(slabs):
            file = folder / f"documents-{number:05d}.safetensors"
            if not file.exists():
                label = f"documents, slab {number + 1} of {len(slabs)}"
                progress = label if setup.progress else None
                _write_slab(file, encoding.documents(part.take(rows).texts, progress=progress))
            encoding.slabs.append(_read_slab(file))
        return encoding.slabs

    def encoding(self, setup: Setup) -> Encoding:
        """Loads the model once for miner and teachers, and warns where it cuts many queries.

        Raises:
            OSError, ValueError: from :func:`~sparton.evaluation.models.load_retriever`.
        """
        if self not in setup.encodings:
            lengths = self.query_length, self.document_length
            retriever = load_retriever(self.model, *lengths, device=setup.device)
            if not isinstance(self.model, Encoder):  # a training mines with its own, and has warned
                shares_cut(str(self.model), retriever[1], setup.sample)
            encode = partial(encode_texts, *retriever, precision=self.precision)
            setup.encodings[self] = Encoding(
                _remembering(partial(encode, side="query")),
                partial(encode, side="document", max_terms=self.max_document_terms),
                [],
            )
        return setup.encodings[self]


Miner = BM25Miner | TrainedModel


def _remembering(encode: Encode) -> Encode:
    """Encodes texts unless they are the last ones again, which a miner and its equals among the
    teachers ask for one after the other.

    Other texts among them, such as one of them twice, would change what shares a batch, and with it
    the last bits.
    """
    last = lru_cache(1)(encode)
    return lambda texts: last(tuple(texts))


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
