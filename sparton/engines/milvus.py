"""Milvus, from 2.4 on.

Sparse vectors are maps of numbers of terms to weights, in an inverted index that is complete.
https://milvus.io/docs/sparse_vector.md
https://milvus.io/api-reference/restful/v2.6.x/v2/Vector%20(v2)/Upsert.md
Token vectors are refused: what Milvus has for lists of vectors is an approximate index alone.
https://milvus.io/docs/array-of-structs.md
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sparton.engines.engine import Answer, Client, Document, Engine, Request
from sparton.types import Kind

# Of pkg/util/merr/errors.go, those of a service that may succeed later: not ready, unavailable, too
# many requests, rate limit, too few resources.
_BUSY = (1, 2, 4, 8, 12)


class Milvus(Engine):
    """See :class:`~sparton.engines.engine.Engine`; the key is a token, or ``USER:PASSWORD``."""

    name = "milvus"
    loses: ClassVar[Mapping[Kind, str]] = {"sparse": "nothing"}
    takes = frozenset(["sparse"])
    suffix = ".json"
    key_variable = "MILVUS_TOKEN"
    index_names = re.compile(r"[a-z][a-z0-9_]*")
    named_terms = False
    search_path = "/v2/vectordb/entities/search"

    def collection(self) -> dict[str, Any]:
        """The body of the request that makes the collection; made twice alike, it is one."""
        identifier = {
            "fieldName": "id",
            "dataType": "VarChar",
            "isPrimary": True,
            "elementTypeParams": {"max_length": str(self.longest_id)},
        }
        index = {
            "fieldName": "sparse",
            "indexName": "sparse",
            "metricType": "IP",
            "indexType": "SPARSE_INVERTED_INDEX",
        }
        return {
            "collectionName": self.index,
            "schema": {
                "autoId": False,
                "enabledDynamicField": False,
                "fields": [identifier, {"fieldName": "sparse", "dataType": "SparseFloatVector"}],
            },
            "indexParams": [index],
        }

    def setup(self) -> dict[str, str]:
        return {"collection.json": json.dumps(self.collection(), indent=2) + "\n"}

    def create(self, client: Client) -> None:
        body = json.dumps(self.collection()).encode()
        self._check(client.call(Request("POST", "/v2/vectordb/collections/create", body)))

    def line(self, document: Document) -> bytes:
        identifier = json.dumps(document.id, ensure_ascii=False)
        return f'{{"id": {identifier}, "sparse": {self.weights_text(document)}}}'.encode()

    def body(self, lines: Sequence[bytes]) -> bytes:
        opening = f'{{"collectionName": {json.dumps(self.index)}, "data": [\n'
        return opening.encode() + b",\n".join(lines) + b"\n]}\n"

    def request(self, ids: Sequence[str], lines: Sequence[bytes]) -> Request:
        return Request("POST", "/v2/vectordb/entities/upsert", self.body(lines))

    def busy(self, ids: Sequence[str], answer: Answer) -> list[int]:
        if answer.content.get("code") in _BUSY:
            return [*range(len(ids))]
        self._check(answer)
        return []

    def _check(self, answer: Answer) -> None:
        """Refusals come with the status of a success."""
        if answer.content.get("code") != 0:
            raise ValueError(f"milvus refused: {answer.content.get('message', answer.content)}")

    def _query(self, query: Document, k: int, depth: int) -> dict[str, Any]:
        return {
            "collectionName": self.index,
            "data": [self.weights(query)],
            "annsField": "sparse",
            "limit": k,
            "outputFields": ["id"],
            "searchParams": {"metricType": "IP", "params": {"drop_ratio_search": 0}},
        }
