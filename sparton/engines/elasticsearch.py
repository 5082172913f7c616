"""Elasticsearch, from 8.19 and 9.1 on.

Sparse vectors are ``sparse_vector``, which by default leaves out terms of a query; ``prune`` is
false here in the index and in queries, so that scores are dot products.
https://www.elastic.co/docs/reference/elasticsearch/mapping-reference/sparse-vector
https://www.elastic.co/docs/reference/query-languages/query-dsl/query-dsl-sparse-vector-query
Token vectors are ``rank_vectors``, scored by ``maxSimDotProduct``: a technical preview.
https://www.elastic.co/docs/reference/elasticsearch/mapping-reference/rank-vectors
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from sparton.engines.lucene import LuceneEngine
from sparton.types import Kind


class Elasticsearch(LuceneEngine):
    """See :class:`~sparton.engines.engine.Engine`; the key is an encoded API key."""

    name = "elasticsearch"
    loses: ClassVar[Mapping[Kind, str]] = {
        "sparse": "9 significant bits of a document's weight are kept",
        "tokens": "nothing; negative scores are 0",
    }
    key_variable = "ELASTICSEARCH_API_KEY"
    maxsim = "Math.max(0.0, maxSimDotProduct(params.query, 'tokens'))"  # no score is negative
    scored: ClassVar[Mapping[str, Any]] = {"exists": {"field": "tokens"}}

    def field_types(self) -> dict[str, Any]:
        return {
            "sparse": {"type": "sparse_vector", "index_options": {"prune": False}},
            "tokens": {"type": "rank_vectors", "dims": self.settings.token_width},
        }

    def headers(self, key: str) -> dict[str, str]:
        return {"Authorization": f"ApiKey {key}"}

    def sparse_query(self, weights: dict[str, float]) -> dict[str, Any]:
        return {"sparse_vector": {"field": "sparse", "query_vector": weights, "prune": False}}
