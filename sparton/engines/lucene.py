"""What OpenSearch and Elasticsearch share: the API of bulks, and fields of features in Lucene.

Lucene keeps of a weight 9 significant bits, an error of at most 0.4 %, takes positive ones alone,
and names of features without dots.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sparton.engines.engine import BUSY, Answer, Client, Document, Engine, Request
from sparton.engines.json_text import vectors_text


class LuceneEngine(Engine):
    """An index of documents with the fields ``sparse`` and ``tokens``."""

    suffix = ".ndjson"
    compressed = True

    maxsim: ClassVar[str]  # a script of what scores token vectors, given params.query
    scored: ClassVar[Mapping[str, Any]]  # the query whose documents it scores

    @abstractmethod
    def field_types(self) -> dict[str, Any]:
        """Types of the fields, by name, of those that are not used, too."""

    @abstractmethod
    def sparse_query(self, weights: dict[str, float]) -> dict[str, Any]:
        """A query by terms and their weights."""

    def maxsim_query(self, vectors: list[list[float]]) -> dict[str, Any]:
        """A query that scores all documents with token vectors."""
        script = {"source": self.maxsim, "params": {"query": vectors}}
        return {"script_score": {"query": dict(self.scored), "script": script}}

    def term_key(self, term: int, name: str) -> str:
        return f"[row {term}]" if "." in name or not name else name

    def mapping(self) -> dict[str, Any]:
        types = self.field_types()
        fields = {kind: types[kind] for kind in sorted(self.kinds)}
        return {"mappings": {"_meta": {"sparton": self.described()}, "properties": fields}}

    def setup(self) -> dict[str, str]:
        return {"index.json": json.dumps(self.mapping(), indent=2) + "\n"}

    def create(self, client: Client) -> None:
        body = json.dumps(self.mapping()).encode()
        answer = client.call(Request("PUT", f"/{self.index}", body), allow=[400])
        if answer.status != 400:
            return
        error = answer.content.get("error", {})
        if error.get("type") != "resource_already_exists_exception":
            raise ValueError(f"{self.name} refused the index {self.index}: {_reason(error)}")
        found = client.call(Request("GET", f"/{self.index}/_mapping")).content
        meta = found.get(self.index, {}).get("mappings", {}).get("_meta", {}).get("sparton")
        if meta != self.described():
            raise ValueError(
                f"the index {self.index} is there and holds something else, or vectors of another "
                "model or settings: choose another name, or delete it"
            )

    def line(self, document: Document) -> bytes:
        fields = []
        if document.terms is not None:
            fields.append(f'"sparse": {self.weights_text(document)}')
        if document.tokens is not None:
            fields.append(f'"tokens": {vectors_text(document.tokens)}')
        action = json.dumps({"index": {"_id": document.id}}, ensure_ascii=False)
        return f"{action}\n{{{', '.join(fields)}}}\n".encode()

    def request(self, ids: Sequence[str], lines: Sequence[bytes]) -> Request:
        body = self.body(lines)
        return Request("POST", f"/{self.index}/_bulk", body, "application/x-ndjson")

    def busy(self, ids: Sequence[str], answer: Answer) -> list[int]:
        again = []
        results = [next(iter(each.values())) for each in answer.content.get("items", [])]
        if len(results) != len(ids):
            raise ValueError(f"{self.name} answered of {len(results)} of {len(ids)} documents")
        for row, result in enumerate(results):
            if result["status"] in BUSY:
                again.append(row)
            elif not 200 <= result["status"] < 300:
                reason = _reason(result.get("error", {}))
                raise ValueError(f"{self.name} refused the document {ids[row]!r}: {reason}")
        return again

    @property
    def search_path(self) -> str:
        return f"/{self.index}/_search"

    def _query(self, query: Document, k: int, depth: int) -> dict[str, Any]:
        body: dict[str, Any] = {"size": k, "_source": False}
        if query.tokens is None:
            return {**body, "query": self.sparse_query(self.weights(query))}
        by_tokens = self.maxsim_query(query.vectors())
        if "sparse" not in self.kinds:
            return {**body, "query": by_tokens}
        rescore = {"rescore_query": by_tokens, "query_weight": 0, "rescore_query_weight": 1}
        return {
            **body,
            "query": self.sparse_query(self.weights(query)),
            "rescore": {"window_size": depth, "query": rescore},
        }


def _reason(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    cause = error.get("caused_by", {}).get("reason")
    return f"{error.get('reason', error)}{f' ({cause})' if cause else ''}"
