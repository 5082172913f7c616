"""What a search engine is to those who push vectors to it.

V terms, E width of a token's vector.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.arguments import ArgumentError
from sparton.encoded.facts import Settings
from sparton.engines.json_text import vectors_text, weights_text
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import KINDS, Representations, TokenVectors
from sparton.retrieval.indexes.protocols import check_kinds, check_request
from sparton.retrieval.settings import RERANK_DEPTH
from sparton.types import Kind

JSON = "application/json"
BUSY = (408, 429, 502, 503, 504)  # statuses of HTTP after which a request may succeed later


class Document(NamedTuple):
    """The vectors of a text; a half that is not pushed, or is empty, is None.

    Attributes:
        id: of the text.
        terms: int32, ascending, and ``weights``, fp32, their weights.
        tokens: fp16 or fp32 ``[n, E]``, of n tokens.
    """

    id: str
    terms: NDArray[np.int32] | None
    weights: NDArray[np.float32] | None
    tokens: NDArray[np.floating] | None

    def vectors(self) -> list[list[float]]:
        """The vectors of its tokens."""
        return [] if self.tokens is None else json.loads(vectors_text(self.tokens))


class Request(NamedTuple):
    """What is sent to an engine: ``path`` follows its address."""

    method: str
    path: str
    body: bytes | None = None
    content_type: str = JSON


class Answer(NamedTuple):
    """What an engine says: a status of HTTP, and the object in the body, or an empty one."""

    status: int
    content: Mapping[str, Any]


class Client(Protocol):
    """Sends a request until it is answered, see :class:`sparton.engines.sending.HttpClient`."""

    def call(self, request: Request, allow: Sequence[int] = ()) -> Answer: ...


class Engine(ABC):
    """An index of a search engine, into which documents are put under their id.

    Args:
        index: its name there.
        settings: how the documents were encoded.
        kind: the half to push of documents that have both; None for all.
        names: of the V terms, in the place of their numbers.

    Attributes:
        name: of the engine.
        takes: the halves that it can search, or one of them.
        loses: what it does not keep of the vectors, by half.
        suffix: of files of documents.
        compressed: whether it reads them gzipped.
        together: how many documents fit into a request; None for as many as make 8 MiB.
        longest_id: bytes.
        key_variable: the environment variable with what authenticates.
        search_path: where queries are sent to.

    Raises:
        ArgumentError: the engine cannot search such vectors, or takes no such name.
    """

    name: ClassVar[str]
    takes: ClassVar[frozenset[Kind]] = frozenset(["sparse", "tokens"])
    loses: ClassVar[Mapping[Kind, str]]
    suffix: ClassVar[str]
    compressed: ClassVar[bool] = False
    together: ClassVar[int | None] = None
    longest_id: ClassVar[int] = 512
    key_variable: ClassVar[str]
    index_names: ClassVar[re.Pattern[str]] = re.compile(r"[a-z][a-z0-9_-]*")
    named_terms: ClassVar[bool] = True

    def __init__(
        self,
        index: str,
        settings: Settings,
        *,
        kind: Kind | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if not self.index_names.fullmatch(index):
            raise ArgumentError(
                "{index} is no name that {} takes: it must match {}",
                self.name,
                self.index_names.pattern,
                index=index,
            )
        if kind is not None and kind not in settings.kinds:
            given = " and ".join(KINDS[each] for each in settings.kinds)
            raise ArgumentError("the texts have {} and not {kind}", given, kind=kind)
        self.kinds = frozenset(settings.kinds if kind is None else [kind])
        for other in sorted(self.kinds - self.takes):
            sentence = "{} has no exact search by {}: choose another engine"
            if rest := self.kinds & self.takes:
                both = f"{sentence}, or push another half alone, as by {{kind}}"
                raise ArgumentError(both, self.name, KINDS[other], kind=min(rest))
            raise ArgumentError(sentence, self.name, KINDS[other])
        if names is not None and not (self.named_terms and "sparse" in self.kinds):
            what = "knows terms by their numbers alone" if "sparse" in self.kinds else "gets none"
            raise ArgumentError("{} {}: leave {names:name} out", self.name, what, names="tokens")
        self.index, self.settings, self._names = index, settings, names

    @cached_property
    def keys(self) -> list[str]:
        """What the V terms are called in the engine.

        Raises:
            ValueError: two of them alike.
        """
        if self._names is None:
            return [str(term) for term in range(self.settings.sparse_width)]
        keys = [self.term_key(term, name) for term, name in enumerate(self._names)]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"two terms are called {twice!r} in {self.name}: push their numbers")
        return keys

    @cached_property
    def _quoted(self) -> list[str]:
        return [json.dumps(key, ensure_ascii=False) for key in self.keys]

    def weights_text(self, document: Document) -> str:
        """The weights of a document by :attr:`keys`, an object of JSON."""
        return weights_text(self._quoted, document.terms, document.weights)

    def weights(self, document: Document) -> dict[str, float]:
        """As :meth:`weights_text`, not written yet."""
        return json.loads(self.weights_text(document))

    def term_key(self, term: int, name: str) -> str:
        """What a term of this number and name is called."""
        return name

    def described(self) -> dict[str, Any]:
        """Whose vectors an index holds, to tell one from another."""
        return {
            "engine": self.name,
            "index": self.index,
            "kinds": sorted(self.kinds),
            "terms": "numbers" if self._names is None else "tokens",
            "model": self.settings.model,
        }

    def check_id(self, identifier: str) -> None:
        """Refuse an id that the engine does not take.

        Raises:
            ValueError: names it.
        """
        if not 1 <= len(identifier.encode()) <= self.longest_id:
            raise ValueError(
                f"the id {identifier[:80]!r} has {len(identifier.encode())} bytes, but {self.name} "
                f"takes ids of 1 to {self.longest_id} bytes: encode the texts with other ids"
            )

    @abstractmethod
    def setup(self) -> dict[str, str]:
        """Files, by their path in a folder, that make the index."""

    @abstractmethod
    def create(self, client: Client) -> None:
        """Make the index, or see that the one that is there is of such vectors.

        Raises:
            ValueError: it holds others.
        """

    @abstractmethod
    def line(self, document: Document) -> bytes:
        """A document in a file; several make one by :meth:`body`."""

    def body(self, lines: Sequence[bytes]) -> bytes:
        """A file of documents, which is what a request sends."""
        return b"".join(lines)

    @abstractmethod
    def request(self, ids: Sequence[str], lines: Sequence[bytes]) -> Request:
        """Put some documents into the index, in the place of those of the same ids."""

    def busy(self, ids: Sequence[str], answer: Answer) -> list[int]:
        """Which documents of a request, by their numbers in it, are to be sent again.

        Raises:
            ValueError: names a document that the engine will never take, and why.
        """
        return []

    def headers(self, key: str) -> dict[str, str]:
        """What authenticates with a ``key``, the value of :attr:`key_variable`."""
        return {"Authorization": f"Bearer {key}"}

    @property
    @abstractmethod
    def search_path(self) -> str: ...

    @abstractmethod
    def _query(self, query: Document, k: int, depth: int) -> dict[str, Any]:
        """The body of the request that finds the k best documents."""

    def query(
        self, queries: Representations, k: int, *, depth: int = RERANK_DEPTH
    ) -> list[dict[str, Any]]:
        """Bodies of requests to :attr:`search_path`, an object of JSON for each query.

        Scores are as exact as the engine has them. Where documents have both halves, the sparse one
        finds ``depth`` candidates, which MaxSim puts in order.

        Args:
            queries: texts on the host that have the halves which were pushed.
            k: results of a query.
            depth: candidates of a query, ``k`` at least.

        Raises:
            ValueError: queries without these halves, one that has none of its own, with which
                engines would find nothing, or ``k`` below 1.
        """
        check_kinds(queries, self.kinds)
        check_request(k, None, queries.num_texts)
        asked = documents_of([""] * queries.num_texts, queries, self.kinds)
        for row, query in enumerate(asked):
            if "sparse" in self.kinds and query.weights is None:
                raise ValueError(f"query {row} has no term with a weight, so that nothing is found")
        return [self._query(each, k, max(depth, k)) for each in asked]


def documents_of(
    ids: Sequence[str], encoded: Representations, kinds: frozenset[Kind]
) -> list[Document]:
    """The vectors of some texts, of the kinds that are pushed."""
    sparse = encoded.sparse if "sparse" in kinds else None
    tokens = encoded.tokens if "tokens" in kinds else None
    assert sparse is None or isinstance(sparse, SparseVectors), "encoded texts are held sparse"
    values = None if tokens is None else _numpy(tokens)
    found = []
    for row, identifier in enumerate(ids):
        terms = weights = vectors = None
        if sparse is not None:
            first, last = sparse.cu_seqlens[row : row + 2].tolist()
            if last > first:
                terms = sparse.terms[first:last].numpy()
                weights = sparse.values[first:last].numpy()
        if tokens is not None and values is not None:
            first, last = tokens.cu_seqlens[row : row + 2].tolist()
            if last > first:
                vectors = values[first:last]
        found.append(Document(identifier, terms, weights, vectors))
    return found


def _numpy(tokens: TokenVectors) -> NDArray[np.floating]:
    """fp16 where they are stored so, else fp32: NumPy has no other."""
    values = tokens.restored().values
    return (values if values.dtype == torch.float16 else values.float()).numpy()
