"""A trained model to use: encode texts, search a collection, and say why a text is found.

Q queries, N documents.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack, cast

import numpy as np
import torch
from torch import Tensor

from sparton.arguments import ArgumentError, refuse_uncounted
from sparton.encoded import EncodedTexts, open_encoded
from sparton.evaluation.explanation import TermMatch, TokenMatch, explain, explain_match
from sparton.evaluation.models import choose_device, load_retriever
from sparton.models.repository import ReadingOptions
from sparton.reading import shown
from sparton.representations import KINDS, Representations
from sparton.retrieval.encoding import check_precision, encode_texts
from sparton.retrieval.indexes.documents import Documents
from sparton.retrieval.indexes.exact import RERANK_DEPTH, IndexBuilder, exact_index
from sparton.retrieval.indexes.protocols import Index, check_request
from sparton.retrieval.storing import VectorDtype, as_stored, query_dtype
from sparton.types import PLURAL, Kind, Side

if TYPE_CHECKING:
    from sparton.datasets.tokenization import PackedTokenizer
    from sparton.models.encoder import Encoder

_SHOWN_FROM = 1000  # texts from which on a bar of progress is shown unless it is said


class Hit(NamedTuple):
    """A document that a query finds.

    Attributes:
        id: its identifier, or its number where the collection has none.
        score: higher is better.
    """

    id: str | int
    score: float


class EncodeOptions(TypedDict, total=False):
    """How texts are encoded; see :meth:`Retriever.encode`."""

    batch_tokens: int | None
    max_terms: int | None
    vector_dtype: VectorDtype
    pool_factor: float | None
    progress: bool | None


class Retriever:
    """An encoder with its tokenizer, in evaluation mode.

    Args:
        encoder: a SPLADE, late-interaction, joint, CSR or dense encoder.
        tokenizer: of the encoder, with the lengths at which texts are cut.
        precision: "fp32", "bf16", "fp16" or "fp8", see
            :func:`~sparton.retrieval.encoding.encode_texts`; None for
            :func:`~sparton.retrieval.encoding.usual_precision`.
    """

    def __init__(
        self, encoder: "Encoder", tokenizer: "PackedTokenizer", *, precision: str | None = None
    ) -> None:
        self.encoder = encoder.eval()
        self.tokenizer = tokenizer
        self.precision = precision

    def __repr__(self) -> str:
        kind, precision = type(self.encoder).__name__, self.precision or "the usual precision"
        return f"Retriever({kind} on {self.device}, {precision})"

    @property
    def device(self) -> torch.device:
        return self.encoder.device

    def encode_queries(
        self, texts: Sequence[str], **options: Unpack[EncodeOptions]
    ) -> Representations:
        """Representations of queries; see :meth:`encode`."""
        return self.encode(texts, "query", **options)

    def encode_documents(
        self, texts: Sequence[str], **options: Unpack[EncodeOptions]
    ) -> Representations:
        """Representations of documents; see :meth:`encode`."""
        return self.encode(texts, "document", **options)

    def encode(
        self,
        texts: Sequence[str],
        side: Side,
        *,
        batch_tokens: int | None = None,
        max_terms: int | None = None,
        vector_dtype: VectorDtype = "float16",
        pool_factor: float | None = None,
        progress: bool | None = None,
    ) -> Representations:
        """Representations of ``texts`` on the host, in their order.

        Batches are made of texts of like length. ``sparse`` of the result holds active weights
        alone (``sparse.dense()`` gives ``[N, V]``), ``tokens`` one vector per token, or one per
        text of a dense model, ``dense`` one per text beside these. The result is a tuple of such
        parts: its texts are counted by ``num_texts``, and cut by ``slice`` and ``take``.

        Args:
            texts: at least one.
            side: "query" or "document".
            batch_tokens: bound of sequences times longest sequence in a batch; None for one that
                suits the device.
            max_terms: keep this many of a text's largest weights; None for all.
            vector_dtype: in which token vectors and dense vectors are stored.
            pool_factor: of so many tokens of a document one vector is left, where they are alike;
                1 for all, None for what the model's folder says.
            progress: whether to show a bar on standard error; None for one from 1,000 texts on.

        Raises:
            ValueError: a single text in the place of a list, no texts, something that is none,
                ``max_terms`` of a model without sparse vectors, ``pool_factor`` of one without
                token vectors, or representations that are not finite.
        """
        texts = _listed(texts, side)
        shown = len(texts) >= _SHOWN_FROM if progress is None else progress
        return encode_texts(
            self.encoder,
            self.tokenizer,
            texts,
            side,
            batch_tokens=batch_tokens,
            precision=self.precision,
            max_terms=max_terms,
            vector_dtype=vector_dtype,
            pool_factor=pool_factor,
            progress=PLURAL[side] if shown else None,
        )

    def similarity(
        self,
        queries: Sequence[str] | Representations,
        documents: Sequence[str] | Representations,
    ) -> Tensor:
        """The score of every query with every document, fp32 ``[Q, N]`` on the host: the weighted
        sum of all scores where the model gives dense vectors beside others, else MaxSim where it
        gives token vectors, else the dot product of sparse vectors."""
        answers = self._encoded(documents, "document")
        asked = self._encoded(queries, "query", query_dtype(_stored_dtype(answers)))
        if answers.tokens is not None and answers.dense is None:
            asked, answers = (side._replace(sparse=None) for side in (asked, answers))
        every = max(answers.num_texts, 1)
        found = exact_index(answers, self.device, rerank_depth=every).search(asked, every)
        scores = np.zeros(found.scores.shape, np.float32)
        place, slot = np.nonzero(found.rows >= 0)
        scores[place, found.rows[place, slot]] = found.scores[place, slot]
        return torch.from_numpy(scores)

    def index(
        self,
        documents: Sequence[str] | Representations | EncodedTexts | str | Path,
        ids: Sequence[str] | None = None,
        *,
        build: IndexBuilder = exact_index,
        rerank_depth: int = RERANK_DEPTH,
    ) -> "TextIndex":
        """An index of documents that is searched by texts.

        Args:
            documents: N texts, or what :meth:`encode_documents` made of them; or the path of a
                folder that ``sparton encode`` has written with this model, or what
                :func:`~sparton.encoded.open_encoded` gives of it.
            ids: N different identifiers; None numbers the documents from 0. A folder has its own.
            build: makes the index of the encoded documents.
            rerank_depth: candidates of a query that MaxSim orders, where the model gives both
                sparse vectors and token vectors; with dense vectors, how many each finds of the
                halves that find candidates for the sum of all scores.

        Raises:
            ValueError: not as many ``ids`` as documents, the same one twice, what :meth:`encode`
                refuses, ``rerank_depth`` below 1, or a folder of queries, of another model, or
                damaged.
            FileNotFoundError: a folder that is none, or not complete.
        """
        refuse_uncounted(1, rerank_depth=rerank_depth)
        if isinstance(documents, str | Path):
            documents = open_encoded(documents)
        named: Sequence[str | int]
        if isinstance(documents, EncodedTexts):
            if ids is not None:
                raise ValueError(f"{documents.folder} has ids of its own: leave ids out")
            if documents.facts.settings.side != "document":
                raise ValueError(f"{documents.folder} holds queries, and documents are searched")
            documents.check_model(self.encoder)
            named, stored = documents.ids, documents.facts.settings.vector_dtype
            indexed = documents.documents()
        else:
            encoded = self._encoded(documents, "document")
            if not encoded.kinds:
                raise ValueError("the representations hold nothing: encode documents")
            if not encoded.kinds & {*self.encoder.kinds}:
                raise ValueError(
                    f"documents have {_halves(encoded.kinds)}, and queries of this model "
                    f"{_halves(self.encoder.kinds)}: encode them with this model"
                )
            number = encoded.num_texts
            named = range(number) if ids is None else _listed_ids(ids, number)
            indexed, stored = Documents.of(encoded), _stored_dtype(encoded)
        try:
            if not callable(build):
                raise ArgumentError(
                    "{index} builds no index: give what does, such as exact_index or "
                    "CompressedIndexBuilder(nbits=2)",
                    index=build,
                )
            index = build(indexed, self.device, rerank_depth=rerank_depth)
        except ArgumentError as error:  # which names what evaluations call the builder
            raise error.renamed(index="build") from error
        return TextIndex(self, index, named, query_dtype(stored))

    def explain(
        self, text: str, document: str | None = None, *, k: int = 20
    ) -> list[tuple[str, float]] | list[TermMatch] | list[TokenMatch]:
        """Why a text is found.

        Args:
            text: a document, or the query where ``document`` is given.
            document: what the query is compared with.
            k: terms at most; the answers of MaxSim to all tokens of a query are given out.

        Returns:
            of a text alone its ``k`` heaviest terms and their weights. Of a query and a document
            what adds up to their score: by MaxSim the token of the document that answers each token
            of the query, by sparse vectors the terms of both, the heaviest product first.

        Raises:
            ValueError: a text alone, of a model without sparse vectors, something that is no text,
                or ``k`` below 1.
        """
        for each in (text, "" if document is None else document):
            if not isinstance(each, str):
                raise ValueError(f"one text is explained at a time, not {each!r}")
        refuse_uncounted(1, k=k)
        if document is None:
            if "sparse" not in self.encoder.kinds:
                raise ValueError(
                    "the terms of sparse vectors explain a text alone, and this model gives "
                    f"{_halves(self.encoder.kinds)}: give a document, too, to compare it with"
                )
            return explain(self.encoder, self.tokenizer, text, k=k)
        return explain_match(self.encoder, self.tokenizer, text, document, k=k)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the folder that :func:`load`, sentence-transformers and PyLate read, all of it or
        nothing. No other thread may encode with the model meanwhile.

        Args:
            path: of the folder, which is made.
            overwrite: write it in the place of all that is in a folder there.

        Raises:
            ArgumentError: a folder that is there has something in it.
            OSError: there is a file, or the disk is full or not writable.
        """
        from sparton.models.folders import save_encoder
        from sparton.models.places import content_of

        if not overwrite and (lies_there := content_of(path)):
            raise ArgumentError(
                "{path} is a folder with something in it, {} for one: name another, or replace all "
                "of it by {overwrite}",
                lies_there,
                path=str(path),
                overwrite=True,
            )
        save_encoder(
            self.encoder,
            path,
            query_length=self.tokenizer.query_length,
            document_length=self.tokenizer.document_length,
        )

    def push_to_hub(
        self,
        repository: str,
        *,
        license: str | None = None,
        private: bool = False,
        token: str | None = None,
    ) -> str:
        """Upload the model with its card to the Hugging Face hub; see :func:`sparton.hub.push`.

        Returns:
            the address of the commit.

        Raises:
            ValueError: no licence is known, or one that the terms of the base do not allow.
        """
        from sparton.hub import push

        with TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            self.save(path)
            return push(path, repository, license=license, private=private, token=token)

    def _encoded(
        self,
        texts: Sequence[str] | Representations,
        side: Side,
        vector_dtype: VectorDtype = "float16",
    ) -> Representations:
        if isinstance(texts, Representations):
            return as_stored(texts, vector_dtype)
        return self.encode(texts, side, vector_dtype=vector_dtype)


class TextIndex:
    """Encoded documents that are searched by texts; made by :meth:`Retriever.index`."""

    def __init__(
        self,
        retriever: Retriever,
        index: Index,
        ids: Sequence[str | int],
        vector_dtype: VectorDtype = "float16",
    ) -> None:
        self.retriever = retriever
        self.index = index
        self.ids = ids
        self._vector_dtype = vector_dtype

    def search(
        self, queries: Sequence[str] | Representations, k: int = 10, *, progress: bool = False
    ) -> list[list[Hit]]:
        """The ``k`` best documents of each query, best first; fewer where fewer are found.

        Args:
            queries: texts, or what :meth:`Retriever.encode_queries` made of them.
            k: at least 1.
            progress: whether to show a bar on standard error.

        Raises:
            ValueError: a single text in the place of a list, a query without text, or ``k`` below
                1.
        """
        check_request(k, None, 0)  # before texts are encoded
        if isinstance(queries, Representations):
            queries = as_stored(queries, self._vector_dtype)
        else:
            queries = _listed(queries, "query")
            for row, text in enumerate(queries):
                if not text.strip() and not isinstance(queries, str):
                    raise ValueError(f"query {row} has no text: leave it out")
            queries = self.retriever.encode(
                queries, "query", vector_dtype=self._vector_dtype, progress=progress
            )
        found = self.index.search(queries, k, progress="search" if progress else None)
        return [
            [
                Hit(self.ids[row], score)
                for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
                if row >= 0
            ]
            for scores, rows in zip(*found, strict=True)
        ]


def load(
    model: str | Path,
    *,
    device: torch.device | str | None = None,
    precision: str | None = None,
    query_length: int | None = None,
    document_length: int | None = None,
    width: int | None = None,
    **reading: Unpack[ReadingOptions],
) -> Retriever:
    """A trained model, ready to use.

    Args:
        model: a folder of this project, of sentence-transformers or of PyLate, a masked-LM
            checkpoint, or a name on the Hugging Face hub.
        device: where to put it; None for a GPU if there is one.
        precision: "fp32", "bf16", "fp16" or "fp8", see
            :func:`~sparton.retrieval.encoding.encode_texts`; None for
            :func:`~sparton.retrieval.encoding.usual_precision`.
        query_length, document_length: tokens at which texts are cut; None takes what the model's
            folder says, or 64 and 256 if it is silent, and at most the model's positions.
        width: how many of the first components of token vectors to take, of a model that was
            trained with several ``widths``; None for all.
        reading: ``revision``, ``cache_dir``, ``model_args``, ``tokenizer_args`` and
            ``config_args``; see :class:`~sparton.models.repository.Source`.

    Raises:
        ValueError: the folder is damaged or of a kind that is not known, a device or precision that
            does not exist or that the model does not have there, or a length or width that the
            model cannot have.
        TypeError: an argument that there is not.
        OSError: there is no such model, or files are missing.
    """
    if unknown := [name for name in reading if name not in ReadingOptions.__annotations__]:
        raise TypeError(f"load() has no argument {unknown[0]}")
    check_precision(precision)
    encoder, tokenizer = load_retriever(
        model,
        query_length,
        document_length,
        device=choose_device(None if device is None else str(device)),
        width=width,
        **reading,
    )
    check_precision(precision, encoder)
    return Retriever(encoder, tokenizer, precision=precision)


def _listed(texts: Sequence[str], side: Side) -> Sequence[str]:
    """Texts in the order in which a loop meets them, which is not that of the labels by which a
    series of pandas is asked; a text alone has an error of its own where it is encoded."""
    if isinstance(texts, str):
        return texts
    if not hasattr(texts, "__len__") or isinstance(texts, Mapping | set | frozenset):
        raise ValueError(f"texts is a {type(texts).__name__}: put them into a list")
    if hasattr(texts, "columns"):
        raise ValueError(f"texts is a {type(texts).__name__}, a table: give one column of it")
    listed = list(texts)
    for row, text in enumerate(listed):
        if not isinstance(text, str):
            raise ValueError(f"{side} {row} is {shown(text)}: each must be a text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{side} {row} holds {text[error.start]!r}, half of a character, as bytes do that "
                "were not UTF-8: correct the text"
            ) from error
    return listed


def _halves(kinds: Iterable[Kind]) -> str:
    return " and ".join(KINDS[kind] for kind in KINDS if kind in kinds)


def _stored_dtype(documents: Representations) -> VectorDtype:
    vectors = documents.tokens or documents.dense
    if vectors is None:
        return "float16"
    return cast(VectorDtype, str(vectors.values.dtype).removeprefix("torch."))


def _listed_ids(ids: Sequence[str], num_documents: int) -> list[str]:
    if not hasattr(ids, "__len__") or isinstance(ids, str | set | frozenset | Mapping):
        raise ValueError(f"ids is a {type(ids).__name__}: put them into a list")
    if len(ids) != num_documents:
        raise ValueError(f"there are {num_documents} documents, but {len(ids)} ids")
    listed = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    for row, each in enumerate(listed):
        if not isinstance(each, str | Integral):
            raise ValueError(f"the id of document {row} is {each!r}: each must be text or a number")
    if len(set(listed)) != len(listed):
        twice = Counter(listed).most_common(1)[0][0]
        raise ValueError(f"the id {twice!r} stands for several documents: ids must differ")
    return listed
