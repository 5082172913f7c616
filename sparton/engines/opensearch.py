"""OpenSearch, from 2.11 on for sparse vectors, from 3.3 on for token vectors.

Sparse vectors are ``rank_features``, searched by ``neural_sparse``: their scores are dot products.
https://docs.opensearch.org/latest/vector-search/ai-search/neural-sparse-with-raw-vectors/
Token vectors are stored as they are and scored by ``lateInteractionScore``.
https://docs.opensearch.org/latest/query-dsl/specialized/script-score/#late-interaction-score
The field type ``sparse_vector`` is not used: it quantizes weights and searches approximately.
https://docs.opensearch.org/latest/mappings/supported-field-types/sparse-vector/
"""

import base64
from collections.abc import Mapping
from typing import Any, ClassVar

from sparton.engines.lucene import LuceneEngine
from sparton.types import Kind


class OpenSearch(LuceneEngine):
    """See :class:`~sparton.engines.engine.Engine`; the key is ``USER:PASSWORD``."""

    name = "opensearch"
    loses: ClassVar[Mapping[Kind, str]] = {
        "sparse": "9 significant bits of a document's weight are kept; a query's are at most 64",
        "tokens": "nothing; a score is MaxSim plus the number of the query's tokens",
    }
    key_variable = "OPENSEARCH_CREDENTIALS"
    # It makes x + 1 of products x, or 1 / (1 - x) of negative ones: scores are not negative.
    maxsim = (
        "params._source.containsKey('tokens') ? "
        "lateInteractionScore(params.query, 'tokens', params._source, 'innerproduct') : 0.0"
    )
    scored: ClassVar[Mapping[str, Any]] = {"match_all": {}}

    def field_types(self) -> dict[str, Any]:
        return {
            "sparse": {"type": "rank_features"},
            "tokens": {"type": "object", "enabled": False},
        }

    def headers(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Basic {base64.b64encode(key.encode()).decode()}"}

    def sparse_query(self, weights: dict[str, float]) -> dict[str, Any]:
        return {"neural_sparse": {"sparse": {"query_tokens": weights}}}
