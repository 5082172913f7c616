"""Qdrant, from 1.10 on.

Sparse vectors are indices and values, token vectors a multivector compared by MAX_SIM, without a
graph, so that searches are exact. Ids are UUIDs made of the texts' ids, which are in the payload.
https://qdrant.tech/documentation/concepts/vectors/
https://qdrant.tech/documentation/concepts/hybrid-queries/
https://api.qdrant.tech/api-reference/points/upsert-points
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlencode
from uuid import NAMESPACE_OID, uuid5

from sparton.engines.engine import Client, Document, Engine, Request
from sparton.engines.json_text import numbers_text, vectors_text
from sparton.types import Kind


class Qdrant(Engine):
    """See :class:`~sparton.engines.engine.Engine`."""

    name = "qdrant"
    loses: ClassVar[Mapping[Kind, str]] = {"sparse": "nothing", "tokens": "nothing"}
    suffix = ".json"
    longest_id = 2**16
    key_variable = "QDRANT_API_KEY"
    named_terms = False

    def collection(self) -> dict[str, Any]:
        """The body of the request that makes the collection."""
        content: dict[str, Any] = {}
        stored = self.settings.vector_dtype
        if "tokens" in self.kinds:
            content["vectors"] = {
                "tokens": {
                    "size": self.settings.token_width,
                    "distance": "Dot",
                    "datatype": "float16" if stored == "float16" else "float32",
                    "multivector_config": {"comparator": "max_sim"},
                    "hnsw_config": {"m": 0},
                }
            }
        if "sparse" in self.kinds:
            content["sparse_vectors"] = {"sparse": {}}
        return content

    def setup(self) -> dict[str, str]:
        return {"collection.json": json.dumps(self.collection(), indent=2) + "\n"}

    def create(self, client: Client) -> None:
        path, wanted = f"/collections/{self.index}", self.collection()
        answer = client.call(Request("GET", path), allow=[404])
        if answer.status == 404:
            client.call(Request("PUT", path, json.dumps(wanted).encode()))
            return
        there = answer.content.get("result", {}).get("config", {}).get("params", {})
        if not _holds(there, wanted):
            raise ValueError(
                f"the collection {self.index} is there and holds other vectors: choose another "
                "name, or delete it"
            )

    def line(self, document: Document) -> bytes:
        vectors = []
        if document.terms is not None and document.weights is not None:
            indices, values = document.terms.tolist(), numbers_text(document.weights)
            vectors.append(f'"sparse": {{"indices": {indices}, "values": {values}}}')
        if document.tokens is not None:
            vectors.append(f'"tokens": {vectors_text(document.tokens)}')
        point, payload = json.dumps(str(uuid5(NAMESPACE_OID, document.id))), {"id": document.id}
        return (
            f'{{"id": {point}, "vector": {{{", ".join(vectors)}}}, '
            f'"payload": {json.dumps(payload, ensure_ascii=False)}}}'
        ).encode()

    def body(self, lines: Sequence[bytes]) -> bytes:
        return b'{"points": [\n' + b",\n".join(lines) + b"\n]}\n"

    def request(self, ids: Sequence[str], lines: Sequence[bytes]) -> Request:
        wait = urlencode({"wait": "true"})  # until searches find them
        return Request("PUT", f"/collections/{self.index}/points?{wait}", self.body(lines))

    def headers(self, key: str) -> dict[str, str]:
        return {"api-key": key}

    @property
    def search_path(self) -> str:
        return f"/collections/{self.index}/points/query"

    def _query(self, query: Document, k: int, depth: int) -> dict[str, Any]:
        exact = {"params": {"exact": True}}
        weights = self.weights(query)
        indices, values = [int(term) for term in weights], [*weights.values()]
        by_terms = {"query": {"indices": indices, "values": values}, "using": "sparse", **exact}
        if "tokens" not in self.kinds:
            return {**by_terms, "limit": k, "with_payload": True}
        body: dict[str, Any] = {"query": query.vectors(), "using": "tokens", **exact}
        if "sparse" in self.kinds:
            body["prefetch"] = [{**by_terms, "limit": depth}]
        return {**body, "limit": k, "with_payload": True}


def _holds(there: Any, wanted: Any) -> bool:
    """Whether an object has what is wanted, and perhaps more."""
    if isinstance(wanted, Mapping):
        return isinstance(there, Mapping) and all(
            key in there and _holds(there[key], value) for key, value in wanted.items()
        )
    return there == wanted
