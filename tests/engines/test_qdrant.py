"""Qdrant's own client, in its local mode: what is pushed there is ranked as our indexes rank it."""

import json

import numpy as np
import pytest
import torch

from sparton.engines import engine_for
from sparton.engines.lines import batches, shards_with_ids
from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes.exact import exact_index
from tests.engines.problems import write_encoded

qdrant_client = pytest.importorskip("qdrant_client")
NUMBER, TERMS, WIDTH = 60, 40, 8


def make(number: int, seed: int) -> Representations:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(number, TERMS, generator=generator) + 0.1
    weights *= torch.rand(number, TERMS, generator=generator) < 0.3
    lengths = torch.randint(1, 6, (number,), generator=generator)
    vectors = torch.randn(int(lengths.sum()), WIDTH, generator=generator)
    vectors = torch.nn.functional.normalize(vectors, dim=1).half()
    return Representations(
        SparseVectors.from_dense(weights), TokenVectors(vectors, cu_seqlens_of(lengths))
    )


@pytest.mark.parametrize("kinds", [("sparse",), ("tokens",), ("sparse", "tokens")])
def test_ranking_is_that_of_our_own_index(kinds, tmp_path):
    documents, queries = make(NUMBER, 0), make(5, 1)
    ids = [f"document {row}" for row in range(NUMBER)]
    texts = write_encoded(tmp_path, documents, ids, rows_per_shard=25)
    kind = kinds[0] if len(kinds) == 1 else None
    engine = engine_for("qdrant", texts.facts.settings, kind=kind)
    models, client = qdrant_client.models, qdrant_client.QdrantClient(":memory:")
    made = models.CreateCollection(**engine.collection())
    client.create_collection(
        "documents", vectors_config=made.vectors, sparse_vectors_config=made.sparse_vectors
    )
    for names, shard in shards_with_ids(texts):
        for batch in batches(engine, names, shard):
            body = json.loads(engine.request(batch.ids, batch.lines).body)
            client.upsert("documents", models.PointsList(**body).points)
    held = Representations(**{each: getattr(documents, each) for each in kinds})
    depth = 20
    expected = exact_index(held, rerank_depth=depth).search(queries, 10)
    for row, body in enumerate(engine.query(queries, 10, depth=depth)):
        asked = models.QueryRequest(**body)
        found = client.query_points(
            "documents",
            query=asked.query,
            using=asked.using,
            prefetch=asked.prefetch,
            limit=asked.limit,
        ).points
        assert [point.payload["id"] for point in found] == [ids[n] for n in expected.rows[row]]
        scores = [point.score for point in found]
        np.testing.assert_allclose(scores, expected.scores[row], rtol=2e-3)
    shuffled = exact_index(held.take(torch.arange(NUMBER).flip(0)), rerank_depth=depth)
    assert (shuffled.search(queries, 10).rows != expected.rows).any(), "order would be noticed"
